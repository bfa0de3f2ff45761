-- queue: the queue of a fair lock. script.rs puts it after the prelude of the scripts that know of it.
--
-- A `place` has the four keys: the lock hash, and
--   queue      list of owner ids, the next one first
--   deadlines  when each of them counts as dead for Redisson: ms since 1970
--   beats      until when each of ours is alive: ms since 1970, written anew every few seconds
-- A waiter with a beat is judged by that, any other by its deadline.

local now_ms = math.floor(now_us / 1000)

-- The keys of an op: the hash is KEYS[at], the three of the queue begin `from` after that.
local function place_at(at, from)
  return {
    hash = KEYS[at],
    queue = KEYS[at + from],
    deadlines = KEYS[at + from + 1],
    beats = KEYS[at + from + 2],
  }
end

-- The deadline and the beat of one owner, if it has them. Raises if a key is of another type: so before any write.
local function look(place, owner)
  call('LINDEX', place.queue, 0)
  return call('ZSCORE', place.deadlines, owner), call('ZSCORE', place.beats, owner)
end

-- Sets a time of the zset `key`.
local function set_time(key, at_ms, owner)
  call('ZADD', key, string.format('%.0f', at_ms), owner)
end

-- The first who is alive, until when (nil: nobody knows), and whether dead ones were skipped. `self` is alive.
local function first_alive(place, self)
  local skipped = false
  while true do
    local head = call('LINDEX', place.queue, 0)
    if not head then
      return nil, nil, skipped
    end
    local ends = call('ZSCORE', place.beats, head) or call('ZSCORE', place.deadlines, head)
    ends = ends and tonumber(ends)
    if head == self or not ends or ends > now_ms then
      return head, ends, skipped
    end
    call('ZREM', place.deadlines, head)
    call('ZREM', place.beats, head)
    call('LPOP', place.queue)
    skipped = true
  end
end

-- Tells the first in the queue to try. How many heard it.
local function tell_first(first, channel)
  return first and tell(channel .. ':' .. first, '0') or 0
end

-- Takes the owner out of the queue and, if the lock is free, tells the first of the others. How many heard it.
-- `ended`: a hold of the lock has just ended.
local function depart(place, owner, channel, ended)
  local deadline, beat = look(place, owner)
  if deadline or beat then
    call('ZREM', place.deadlines, owner)
    call('ZREM', place.beats, owner)
    call('LREM', place.queue, -1, owner)
  elseif not ended then
    return 0
  end
  if ARGV[3] == 'OFF' or redis.pcall('EXISTS', place.hash) == 1 then
    return 0
  end
  return tell_first(first_alive(place), channel)
end
