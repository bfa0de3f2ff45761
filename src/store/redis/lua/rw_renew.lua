-- rw_renew: move the deadline of a reader's or a writer's hold forward, and put its count right on the way.
--
-- KEYS      per op: lock hash (see rw.lua), key with the lease of this owner as a reader
-- ARGV      attempt, deadline, then per op: owner id, count, lease in ms,
--           what the keys with the leases of readers begin with
--
-- Returns   RENEWED left  the deadline is at least a lease away
--           GONE 0 or 1   this owner holds nothing, and nothing was made; what is there instead
--           LATE          past the deadline: nothing done
-- Writes    PEXPIRE of the hold's own lease, if only of the same deadline, and of the hash if that ends
--           sooner; HSET of another count. Nothing of other readers: who crashes is not kept alive
-- Repeat    safe: a copy only moves the deadline again

local function renew(hash, own, owner, count, lease_ms, base)
  local field, before = held_by(hash, own, owner)
  if not field then
    return gone(hash)
  end
  if late then
    return LATE
  end
  local left = lengthen_field(hash, own, owner, field, lease_ms, base)
  if before ~= tostring(count) then
    redis.pcall('HSET', hash, field, count) -- refused: the deadline has moved, which is what counts
  end
  return RENEWED, left
end

local ops = op_count(2, 2, 4)
for i = 1, ops do
  ARGV[4 * i], ARGV[4 * i + 1] = whole(4 * i, 1), whole(4 * i + 1, 1)
end
for i = 1, ops do
  answer(renew, KEYS[2 * i - 1], KEYS[2 * i], unpack(ARGV, 4 * i - 1, 4 * i + 2))
end
return reply
