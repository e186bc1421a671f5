-- Loading a level (app/domain/loading.py says what and why); follows token_bucket.lua, in its function.

function token_bucket.load_tokens(part, packed, from, _, became)
  local tokens, since = unpack_(TOKENS, packed, from)
  if tokens_at(part, tokens, since, part.t) >= part.burst then
    became[OVER] = became[OVER] + 1
    return
  end
  local at = max(part.at or since, since)
  local level = tokens_at(part, tokens, since, at)
  if part.newest and tokens_at(part, part.tokens, part.at, at) <= level then
    became[THERE] = became[THERE] + 1
    return
  end
  part.tokens, part.at = level, at
  write_tokens(part)
  became[ADDED] = became[ADDED] + 1
end
