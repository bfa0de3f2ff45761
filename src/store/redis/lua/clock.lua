-- clock: tell the server's time.
--
-- ARGV      attempt, 0
--
-- Returns   {attempt, now in µs}
-- Writes    nothing
return reply
