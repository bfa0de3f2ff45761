-- fair_beat: keep a place in the queue of a fair lock.
--
-- KEYS      per op: lock hash, queue, deadlines, beats
-- ARGV      attempt, deadline, how to publish (PLAIN, SHARDED, BOTH, OFF), then per op: owner id,
--           how long it counts as alive in ms, Redisson's wait timeout in ms, channel
--
-- Returns   QUEUED 1 or 0, left  in the queue (1: as the first); when something changes by itself (-1: never;
--                                0: it is this owner's turn)
--           GONE 0 or 1          it is not in the queue, and was not put there; what the lock is instead
--           LATE                 past the deadline: nothing done
-- Writes    ZADD of its beat and its deadline; who is first and dead is removed, and the next one told
-- Repeat    safe: never puts anybody into the queue

local function keep_place(place, owner, beat_ms, wait_ms, channel)
  call('HEXISTS', place.hash, owner) -- raises if it is no hash: then there is nothing to wait for
  local deadline, beat = look(place, owner)
  if not stands_in(place, owner, deadline) then
    return gone(place.hash)
  end
  if late then
    return LATE
  end
  local first, ends, skipped = first_alive(place, owner)
  ends = mend(place, owner, first, ends, wait_ms)
  keep(place, owner, deadline, beat, beat_ms, wait_ms)
  return queued(owner, call('PTTL', place.hash), first, ends, skipped, channel)
end

local ops = op_count(4, 3, 4)
for i = 1, ops do
  ARGV[4 * i + 1], ARGV[4 * i + 2] = whole(4 * i + 1, 1), whole(4 * i + 2, 1)
end
for i = 1, ops do
  answer(keep_place, place_at(4 * i - 3, 1), unpack(ARGV, 4 * i, 4 * i + 3))
end
return reply
