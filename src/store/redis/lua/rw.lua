-- rw: what the scripts of the read/write lock share. script.rs puts it after the prelude and the tokens.
--
-- The lock hash has a field `mode` (`read` or `write`), a field `<owner>` for each reader and a field
-- `<owner>:write` for the writer; their values are hold counts. It lasts as long as the longest lease. A
-- reader's own lease is in keys beside it, `<base>:<owner>:rwlock_timeout:<i>`: Redisson's readers have one
-- for each of their holds, i from 1 to the count, ours the first only. The names of other readers' keys are
-- made of the fields found, as Redisson makes them, since who calls cannot know them; they share the slot of
-- the hash.
--
-- A reader without such a key is dead. He is not there for anybody, and is removed in passing.

-- Hashes with more items than this (fields and values) are not looked through for what is not ours.
local SMALL_HASH = 2 * 16

-- Holds of one reader that are looked at, whatever a count may say.
local MOST_HOLDS = 256

local function is_reader(field, count)
  return string.find(field, '^.+:%-?%d+$') and string.find(count, '^[1-9]%d*$')
end

local function is_writer(field, count)
  return string.find(field, '^.+:%-?%d+:write$') and string.find(count, '^[1-9]%d*$')
end

-- What is left of a reader's longest lease: nil if he is dead, math.huge if it has no end.
local function reader_left(base, reader, count)
  local longest
  for i = 1, math.min(tonumber(count), MOST_HOLDS) do
    local left = call('PTTL', base .. ':' .. reader .. ':rwlock_timeout:' .. i)
    if left == -1 then
      return math.huge
    end
    if left >= 0 then
      longest = math.max(left, longest or 0)
    end
  end
  return longest
end

-- Raises if the hash is plainly no read/write lock. Looks at small ones only.
local function check_fields(fields)
  if #fields > SMALL_HASH then
    return
  end
  for i = 1, #fields, 2 do
    local field, count = fields[i], fields[i + 1]
    if field ~= 'mode' and not is_reader(field, count) and not is_writer(field, count) then
      error('CONFLICT the key is a hash in other use', 0)
    end
  end
end

-- `read` or `write`; raises if the hash is neither.
local function mode_of(hash)
  local mode = call('HGET', hash, 'mode')
  if mode ~= 'read' and mode ~= 'write' then
    error('CONFLICT the key is no read/write lock', 0)
  end
  return mode
end

-- What is left of the longest lease of all but `but`: nil if nobody holds the lock, math.huge if there is
-- no end to it. Also the fields of dead readers.
local function others(fields, base, hash_left, but)
  local longest, dead = nil, {}
  for i = 1, #fields, 2 do
    local field, left = fields[i], nil
    if field == 'mode' or field == but then
      left = nil
    elseif is_reader(field, fields[i + 1]) then
      left = reader_left(base, field, fields[i + 1])
      if not left then
        dead[#dead + 1] = field
      end
    else -- the writer; or, in a large hash, something else that is in the way
      left = hash_left == -1 and math.huge or hash_left
    end
    if left then
      longest = math.max(left, longest or 0)
    end
  end
  return longest, dead
end

-- A lease for an answer: -1 if it has no end.
local function told(left)
  return left == math.huge and -1 or left
end

-- The field by which `owner` holds the lock, as the writer or as a living reader, and its value; nil if he
-- does not.
local function held_by(hash, own, owner)
  local count = of_owner('HGET', hash, owner .. ':write')
  if count then
    return owner .. ':write', count
  end
  count = of_owner('HGET', hash, owner)
  if count and call('PTTL', own) ~= -2 then
    return owner, count
  end
end

-- Moves the deadline of a hold forward, as `lengthen` does. A hash whose expiry somebody took away gets the
-- longest of its readers' back.
local function lengthen_field(hash, own, owner, field, lease_ms, base)
  if field ~= owner then
    return lengthen(hash, lease_ms)
  end
  local left = lengthen(own, lease_ms)
  local hash_left = call('PTTL', hash)
  if hash_left == -1 then
    local longest = others(call('HGETALL', hash), base, left, owner)
    hash_left = longest ~= math.huge and longest or left
  end
  call('PEXPIRE', hash, math.max(hash_left, left))
  return left
end

-- Another level of a hold.
local function nest(hash, own, owner, count, lease_ms, base)
  local field, before = held_by(hash, own, owner)
  if not field then
    return gone(hash)
  end
  if late then
    return LATE
  end
  if before ~= tostring(count) then
    call('HSET', hash, field, count)
  end
  return HELD, lengthen_field(hash, own, owner, field, lease_ms, base)
end

-- Says to everybody on `channel` that he may come in. In Redisson `1` wakes all who sleep, but, as we read it,
-- not one who has found the lock taken and does not sleep yet; `0` wakes one, or keeps the next from sleeping.
local function tell_all(channel)
  local heard = tell(channel, '1')
  tell(channel, '0')
  return heard
end

-- After a field was removed: forgets a lock that nobody holds any more, and lets readers in that the writer
-- kept out. How many heard that they may try.
--
-- Everybody is told in both cases. Redisson's own readers wake one in each process: if that is a reader, the
-- others wait though they could go.
local function settle(hash, base, channel)
  local mode, alive = call('HGET', hash, 'mode'), false
  if mode ~= 'read' and mode ~= 'write' then
    return 0
  end
  local fields = call('HGETALL', hash)
  for i = 1, #fields, 2 do
    local field, count = fields[i], fields[i + 1]
    if field ~= 'mode' then
      if not is_reader(field, count) then
        return 0
      end
      alive = alive or reader_left(base, field, count) ~= nil
      if alive and mode == 'read' then
        return 0
      end
    end
  end
  if alive then
    redis.pcall('HSET', hash, 'mode', 'read')
  else
    call('DEL', hash)
  end
  return tell_all(channel)
end
