--[[ Loads samples (app/domain/loading.py has the rules); follows sampled_rate.lua in its maker function.

check    the bucket as sampled_rate.load left it: KEYS[n] of load.lua
packed   `count` items of kind 3 from position `from` on: struct <d d d> sum (units), start (ms), last event (ms)
tally    counts the results: ADDED, THERE, OVER
Example  <40, 1000, 1900> onto a sample <30, 1000, 1500>: that becomes <40, 1000, 1900>, and tally[ADDED] grows by 1
]]

function sampled_rate.load_samples(check, packed, from, count, tally)
  local list, by_start, changed = samples_of(check), {}, false
  for _, sample in ipairs(list) do by_start[sample[2]] = sample end
  for at = from, from + (count - 1) * SAMPLE_BYTES, SAMPLE_BYTES do
    local value, start, last = unpack_(SAMPLE, packed, at)
    local old = by_start[start]
    if check.t - last >= max(check.samples, 2) * check.sample_ms then
      tally[OVER] = tally[OVER] + 1
    elseif old and old[1] >= value and old[3] >= last then
      tally[THERE] = tally[THERE] + 1
    else
      if old then
        old[1], old[3] = max(old[1], value), max(old[3], last)
      else
        by_start[start] = { value, start, last }
        list[#list + 1] = by_start[start]
      end
      tally[ADDED], changed = tally[ADDED] + 1, true
    end
  end
  if changed then
    table.sort(list, function(one, other) return one[2] < other[2] end)
    for i = 2, #list do list[i][3] = max(list[i][3], list[i - 1][3]) end
    end_birth(check)
    write_all(check, pack_previous(check, list))
  end
end
