-- Takes a deleted trajectory out of its scope's lists, and tells the processes that have read it.
--
-- KEYS[1] trajectories by time (sorted set)   KEYS[2] their bytes (hash)   KEYS[3] digests of deleted ones by time (sorted set)
-- ARGV[1] the trajectory   ARGV[2] its digest   ARGV[3] lifetime in seconds
--
-- Returns 1 where the scope knew it.

-- Removing first: a Redis without memory lets a script that has removed something add the digest.
local known = redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
local time = redis.call('TIME')
redis.call('ZADD', KEYS[3], string.format('%d.%06d', time[1], time[2]), ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', '(' .. (tonumber(time[1]) - tonumber(ARGV[3])))
redis.call('EXPIRE', KEYS[3], ARGV[3])
return known
