--[[ Loads a level (app/domain/loading.py has the rules); follows token_bucket.lua in its maker function.

check    the bucket as token_bucket.load left it: KEYS[n] of load.lua
packed   one item of kind 4 at position `from`: struct <d d> tokens (units), time (ms)
tally    counts the result: ADDED, THERE, OVER
Example  <5 tokens, 1000 ms> onto a bucket of <8, 1000>: the lower level stays, so the bucket holds <5, 1000>
]]

function token_bucket.load_tokens(check, packed, from, _, tally)
  -- Levels are compared as if nothing were held; the next read of the bucket cuts them to the burst less the held
  -- units.
  check.most = check.burst
  local tokens, since = unpack_(TOKENS, packed, from)
  if tokens_at(check, tokens, since, check.t) >= check.burst then
    tally[OVER] = tally[OVER] + 1
    return
  end
  local at = max(check.at or since, since)
  local level = tokens_at(check, tokens, since, at)
  if check.newest and tokens_at(check, check.tokens, check.at, at) <= level then
    tally[THERE] = tally[THERE] + 1
    return
  end
  check.tokens, check.at = level, at
  end_birth(check)
  write_tokens(check)
  tally[ADDED] = tally[ADDED] + 1
end
