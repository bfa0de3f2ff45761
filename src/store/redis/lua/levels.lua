-- levels: holds of one owner at a time, and their hold counts. script.rs puts it before the scripts of the plain
-- and the fair lock, which have this in common.

-- Raises if the hash is plainly no lock of this kind. Looks at small hashes only.
local function check_use(hash)
  if call('HLEN', hash) > 16 then
    return
  end
  local fields = call('HGETALL', hash)
  for i = 1, #fields, 2 do
    if fields[i] == 'mode' then
      error('CONFLICT the key is a read/write lock', 0)
    end
    if not string.find(fields[i], '^.+:%-?%d+$') or not string.find(fields[i + 1], '^[1-9]%d*$') then
      error('CONFLICT the key is a hash in other use', 0)
    end
  end
end

-- Makes the first level of a hold.
local function begin(hash, owner, lease_ms)
  expect(ask('HSET', hash, owner, '1'), 'HSET')
  local expires = ask('PEXPIRE', hash, lease_ms)
  if expires ~= 1 then -- a hold without deadline would stay for ever
    redis.pcall('HDEL', hash, owner)
    error(expires.err .. ' (PEXPIRE)', 0)
  end
end

-- Sets the count of a hold that is there, to 2 and more.
local function nest(hash, owner, count, lease_ms)
  local before = of_owner('HGET', hash, owner)
  if not before then
    return gone(hash)
  end
  if late then
    return LATE
  end
  if before ~= tostring(count) then
    call('HSET', hash, owner, count)
  end
  return HELD, lengthen(hash, lease_ms)
end

-- Sets the count that remains of a hold.
local function leave(hash, owner, count)
  local before = of_owner('HGET', hash, owner)
  if not before then
    return gone(hash)
  end
  if late then
    return LATE
  end
  if before ~= tostring(count) then
    local ok, problem = pcall(call, 'HSET', hash, owner, count)
    -- Without memory the count stays too high until the next renewal: still held all the same.
    if not ok and not string.find(problem, 'OOM ', 1, true) then
      error(problem, 0)
    end
  end
  return STILL_HELD, math.max(call('PTTL', hash), 0)
end
