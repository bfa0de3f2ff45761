-- fair_enqueue: take a fair lock when it is this owner's turn, or else stand in its queue.
--
-- KEYS      per op: lock hash (field: owner id, value: hold count), token counter, queue, deadlines, beats
-- ARGV      attempt, deadline, how to publish (PLAIN, SHARDED, BOTH, OFF), then per op: owner id, lease in ms,
--           greatest token the client knows, retention of the counter in ms (0: for ever),
--           how long it counts as alive in ms, Redisson's wait timeout in ms, channel
--
-- Returns   GRANTED token, left  taken now or by an earlier copy of this op
--           QUEUED 1 or 0, left  in the queue (1: as the first); when something changes by itself (-1: never)
--           LATE                 past the deadline: nothing done
-- Writes    who is first and dead is removed, and the next one told. GRANTED: SET of the counter, HSET, PEXPIRE, its
--           place is removed. QUEUED: RPUSH unless it is there, ZADD of its beat and its deadline
-- Repeat    safe until the Release of this owner id: a copy finds the hold, or the place

-- One of Redisson's that is first from now on has the time it would have if it came now.
local function greet_next(place, lease_ms, wait_ms)
  local head = call('LINDEX', place.queue, 0)
  if not head or call('ZSCORE', place.beats, head) then
    return
  end
  local deadline, least = call('ZSCORE', place.deadlines, head), now_ms + lease_ms + wait_ms
  if not deadline or tonumber(deadline) < least then
    set_time(place.deadlines, least, head)
  end
end

local function enqueue(place, counter, owner, lease_ms, floor, retention_ms, beat_ms, wait_ms, channel)
  local left = call('PTTL', place.hash)
  if left ~= -2 then
    if call('HEXISTS', place.hash, owner) == 1 then
      return granted_before(place.hash, counter, left, lease_ms, floor)
    end
    check_use(place.hash)
  end
  local deadline, beat = look(place, owner)
  if late then
    return LATE
  end
  local first, ends, skipped = first_alive(place, owner)
  if left == -2 and (not first or first == owner) then
    local token = next_token(counter, lease_ms, floor, retention_ms)
    begin(place.hash, owner, lease_ms)
    if first then
      call('LPOP', place.queue)
    end
    call('ZREM', place.deadlines, owner)
    call('ZREM', place.beats, owner)
    greet_next(place, lease_ms, wait_ms)
    return GRANTED, token, lease_ms
  end
  ends = mend(place, owner, first, ends, wait_ms)
  local stands = first == owner or stands_in(place, owner, deadline)
  -- Entries are missing: it may be in the list all the same.
  if not stands and (deadline or beat or call('LLEN', place.queue) > call('ZCARD', place.deadlines)) then
    call('LREM', place.queue, 0, owner)
  end
  keep(place, owner, deadline, beat, beat_ms, wait_ms)
  if not stands then
    local pushed = redis.pcall('RPUSH', place.queue, owner)
    if type(pushed) == 'table' then
      redis.pcall('ZREM', place.deadlines, owner)
      redis.pcall('ZREM', place.beats, owner)
      error(pushed.err .. ' (RPUSH)', 0)
    end
  end
  return queued(owner, left, first, ends, skipped, channel)
end

local ops = op_count(5, 3, 7)
for i = 1, ops do
  local at = 7 * i - 3
  ARGV[at + 1] = whole(at + 1, 1)
  ARGV[at + 2], ARGV[at + 3] = whole(at + 2, 0), whole(at + 3, 0)
  ARGV[at + 4], ARGV[at + 5] = whole(at + 4, 1), whole(at + 5, 1)
end
for i = 1, ops do
  local at = 7 * i - 3
  answer(enqueue, place_at(5 * i - 4, 2), KEYS[5 * i - 3], unpack(ARGV, at, at + 6))
end
return reply
