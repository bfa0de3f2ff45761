-- fair_release: end a hold of a fair lock or a place in its queue, or set the hold count that remains.
--
-- KEYS      per op: lock hash (field: owner id, value: hold count), queue, deadlines, beats
-- ARGV      attempt, deadline, how to publish (PLAIN, SHARDED, BOTH, OFF), then per op:
--           owner id, count, a second owner id whose hold goes with the first ('': none), channel
--
-- Returns   count 0:   RELEASED heard   the hold is removed now, however late; how many heard the message
--           count 1..: STILL_HELD left  count set, the deadline as it was; left 0: no expiry
--                      LATE             past the deadline: nothing done
--           GONE 0 or 1                 there is no hold (a place is removed all the same); what is there instead
-- Writes    HDEL; the place is removed; if the lock is free then, who is first and dead is removed, and the next one
--           told; HSET of another count
-- Repeat    safe: a copy finds nothing, or its own count. After it the owner id is not used any more

local function release(place, owner, also, channel)
  local removed
  if also == '' then
    removed = of_owner('HDEL', place.hash, owner)
  else
    removed = of_owner('HDEL', place.hash, owner, also)
  end
  removed = (removed or 0) > 0
  local ok, heard = pcall(depart, place, owner, channel, removed)
  if not removed then
    return gone(place.hash)
  end
  return RELEASED, ok and heard or 0
end

local ops = op_count(4, 3, 4)
for i = 1, ops do
  ARGV[4 * i + 1] = whole(4 * i + 1, 0)
end
for i = 1, ops do
  local owner, count, also, channel = unpack(ARGV, 4 * i, 4 * i + 3)
  local place = place_at(4 * i - 3, 1)
  if count == 0 then
    answer(release, place, owner, also, channel)
  else
    answer(leave, place.hash, owner, count)
  end
end
return reply
