-- What happened in a scope since a moment.
--
-- KEYS[1] trajectories by time (sorted set)   KEYS[2] digests of deleted ones by time (sorted set)
-- ARGV[1] the moment, as an earlier call gave it; empty for now   ARGV[2] most trajectories
--
-- Returns the moment of this call, the trajectories written since (newest first) and the digests of deleted ones.

local time = redis.call('TIME')
local now = string.format('%d.%06d', time[1], time[2])
if ARGV[1] == '' then
    return {now, {}, {}}
end
return {
    now,
    redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', ARGV[1], 'LIMIT', 0, ARGV[2]),
    redis.call('ZRANGEBYSCORE', KEYS[2], ARGV[1], '+inf'),
}
