-- Loading samples (app/domain/loading.py says what and why); follows sampled_rate.lua, in its function.

function sampled_rate.load_samples(part, packed, from, count, became)
  local list, by_start, changed = samples_of(part), {}, false
  for _, sample in ipairs(list) do by_start[sample[2]] = sample end
  for at = from, from + (count - 1) * SAMPLE_BYTES, SAMPLE_BYTES do
    local value, start, last = unpack_(SAMPLE, packed, at)
    local old = by_start[start]
    if part.t - last >= max(part.samples, 2) * part.sample_ms then
      became[OVER] = became[OVER] + 1
    elseif old and old[1] >= value and old[3] >= last then
      became[THERE] = became[THERE] + 1
    else
      if old then
        old[1], old[3] = max(old[1], value), max(old[3], last)
      else
        by_start[start] = { value, start, last }
        list[#list + 1] = by_start[start]
      end
      became[ADDED], changed = became[ADDED] + 1, true
    end
  end
  if changed then
    table.sort(list, function(one, other) return one[2] < other[2] end)
    for i = 2, #list do list[i][3] = max(list[i][3], list[i - 1][3]) end
    write_all(part, list)
  end
end
