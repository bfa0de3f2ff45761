-- keeping: how a waiter of a fair lock stays in the queue. script.rs puts it after queue.lua.

-- Whether who has this deadline is in the list as well. Looked for only where entries are missing.
local function stands_in(place, owner, deadline)
  if not deadline then
    return false
  end
  if call('LLEN', place.queue) >= call('ZCARD', place.deadlines) then
    return true
  end
  return call('LPOS', place.queue, owner) and true
end

-- When `first` is not alive any more. One of whom nobody knows gets a deadline, or it would stand there for ever.
local function mend(place, owner, first, ends, wait_ms)
  if first and first ~= owner and not ends then
    ends = now_ms + wait_ms
    set_time(place.deadlines, ends, first)
  end
  return ends
end

-- Keeps a place for `beat_ms` more. Redisson's clients subtract their own wait from all deadlines when they take the
-- lock, so ours has one wait for each of theirs on top. The beats are kept as long as the deadlines, or a dead waiter
-- of ours would be judged like one of theirs.
local function keep(place, owner, deadline, beat, beat_ms, wait_ms)
  local theirs = call('ZCARD', place.deadlines) - (deadline and 1 or 0)
  theirs = math.max(theirs - call('ZCARD', place.beats) + (beat and 1 or 0), 0)
  set_time(place.beats, now_ms + beat_ms, owner)
  local ends = now_ms + wait_ms * (1 + theirs)
  if deadline and tonumber(deadline) >= ends then
    ends = tonumber(deadline)
  else
    set_time(place.deadlines, ends, owner)
  end
  local lasts = math.max(ends - now_ms, beat_ms)
  if call('PTTL', place.beats) < lasts then
    call('PEXPIRE', place.beats, string.format('%.0f', lasts))
  end
end

-- The answer to one who is in the queue. `first` is the first who is alive, if there was one before this owner came,
-- and `ends` when it is not any more.
local function queued(owner, left, first, ends, skipped, channel)
  local is_first = not first or first == owner
  if left == -2 then
    if is_first then
      return QUEUED, 1, 0 -- free: it may take it now
    end
    if skipped then
      tell_first(first, channel)
    end
    return QUEUED, 0, math.max(ends - now_ms, 1)
  end
  return QUEUED, is_first and 1 or 0, left == -1 and left or math.max(left, 1)
end
