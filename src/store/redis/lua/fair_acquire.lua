-- fair_acquire: take a fair lock for which nobody waits, or set the hold count of one that is held.
--
-- KEYS      per op: lock hash (field: owner id, value: hold count), token counter, queue, deadlines, beats
-- ARGV      attempt, deadline, how to publish (PLAIN, SHARDED, BOTH, OFF), then per op: owner id, count, lease in ms,
--           greatest token the client knows, retention of the counter in ms (0: for ever), channel
--
-- Returns   count 1:   GRANTED token, left  taken now or by an earlier copy of this op
--                      LATE                 past the deadline: nothing done
--                      TAKEN left or -1     somebody has it, or is before it
--           count 2..: HELD left            count set, deadline not sooner than before
--                      GONE 0 or 1          the hold is lost; what is there instead
--                      LATE                 past the deadline: nothing done
-- Writes    as lock_acquire; who is first and dead is removed, and the next one told
-- Repeat    safe: a copy finds its owner id and changes nothing (it writes the same deadline again)

local function take(place, counter, owner, lease_ms, floor, retention_ms, channel)
  local left = call('PTTL', place.hash)
  if left ~= -2 then
    if call('HEXISTS', place.hash, owner) == 1 then
      return granted_before(place.hash, counter, left, lease_ms, floor)
    end
    check_use(place.hash)
  end
  look(place, owner)
  if late then
    return LATE
  end
  if left ~= -2 then
    return TAKEN, left
  end
  local first, ends, skipped = first_alive(place)
  if first then
    if skipped then
      tell_first(first, channel)
    end
    return TAKEN, ends and ends - now_ms or -1
  end
  local token = next_token(counter, lease_ms, floor, retention_ms)
  begin(place.hash, owner, lease_ms)
  return GRANTED, token, lease_ms
end

local ops = op_count(5, 3, 6)
for i = 1, ops do
  local at = 6 * i - 2
  ARGV[at + 1], ARGV[at + 2] = whole(at + 1, 1), whole(at + 2, 1)
  ARGV[at + 3], ARGV[at + 4] = whole(at + 3, 0), whole(at + 4, 0)
end
for i = 1, ops do
  local owner, count, lease_ms, floor, retention_ms, channel = unpack(ARGV, 6 * i - 2, 6 * i + 3)
  local place, counter = place_at(5 * i - 4, 2), KEYS[5 * i - 3]
  if count == 1 then
    answer(take, place, counter, owner, lease_ms, floor, retention_ms, channel)
  else
    answer(nest, place.hash, owner, count, lease_ms)
  end
end
return reply
