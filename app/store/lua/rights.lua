--[[ Finds the commands that the user of this connection may not run; runs none of them.

KEYS     none
ARGV[.]  string  commands with all their arguments, between blanks; a server may crash on one that lacks some
Reply    the numbers of the commands that are not allowed, from 1
Example  EVAL ... 0 'TIME' 'FUNCTION LOAD x' 'GET qg1:order'
         2
]]
local missing = {}
for place, command in ipairs(ARGV) do
  local words = {}
  for word in string.gmatch(command, '%S+') do words[#words + 1] = word end
  if not redis.acl_check_cmd(unpack(words)) then missing[#missing + 1] = place end
end
return missing
