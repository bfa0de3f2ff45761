-- lock_remember: raise the token counter to a token that was given under several servers at once.
--
-- KEYS      per op: token counter
-- ARGV      attempt, deadline, then per op: lease in ms, the token, retention of the counter in ms (0: for ever)
--
-- Returns   REMEMBERED counter  the counter is at least the token, now or before
--           LATE                past the deadline: nothing done
-- Writes    SET of the counter, if it was below the token
-- Repeat    safe: the counter only ever rises

local function remember(counter, lease_ms, token, retention_ms)
  local last = last_token(counter)
  if last and last >= token then
    return REMEMBERED, last
  end
  if late then
    return LATE
  end
  local text = string.format('%.0f', token)
  if retention_ms == 0 or (last and call('PTTL', counter) == -1) then
    call('SET', counter, text)
  else
    call('SET', counter, text, 'PX', math.floor(1.5 * math.max(retention_ms, 2 * lease_ms)))
  end
  return REMEMBERED, token
end

local ops = op_count(1, 2, 3)
for i = 1, ops do
  whole(3 * i, 1)
  whole(3 * i + 1, 1)
  whole(3 * i + 2, 0)
end
answer_each(ops, function(i)
  return remember(KEYS[i], numbers[ARGV[3 * i]], numbers[ARGV[3 * i + 1]], numbers[ARGV[3 * i + 2]])
end)
return reply
