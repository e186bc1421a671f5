--[[ Reads the live layers of a bucket of producer ids; follows producer_ids.lua in its maker function.

KEYS[1]  string  the bucket (producer_ids.lua)
ARGV[1]  integer now (ms since 1970); a bucket that is ahead of it is read as of its newest time, as a decision does
ARGV[2]  integer ttl of a layer (ms)
Reply    { { number of the layer, its begin (ms since 1970), ids whose newest layer it is (count) }, ... }, oldest first
Example  two layers; of three ids in the first one, one was seen again in the second, together with a new id:
         EVAL ... 1 qg1:{user=alice}:producer_ids_rate:... 1763719742123 4800000
         { { 1, 1763718000000, 2 }, { 2, 1763719700000, 2 } }
]]
function producer_ids.read_layers(keys, args)
  assert(#keys == 1 and #args == 2, 'layers_read takes 1 key and 2 arguments')
  local check, found = { key = keys[1] }, {}
  producer_ids.load(check, 0, 0, tonumber(args[2]), 0, 0)
  check.t = max(tonumber(args[1]), check.newest or 0)
  for number = max(check.number - LAYERS + 1, 1), check.number do
    if is_live(check, number) then
      found[#found + 1] = { number, check.starts[number % LAYERS], remembered_by(check, number) }
    end
  end
  return found
end
