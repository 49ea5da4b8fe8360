-- Notes that a trajectory of a scope was written, and which of the scope's trajectories have to leave for it.
--
-- KEYS[1] trajectories by the time of their last write (sorted set)   KEYS[2] their bytes (hash)
-- ARGV[1] the trajectory   ARGV[2] its bytes   ARGV[3] lifetime in seconds   ARGV[4] most trajectories   ARGV[5] most bytes
--
-- Returns the trajectories that leave, oldest first.

local recent, sizes = KEYS[1], KEYS[2]
local time = redis.call('TIME')
redis.call('ZADD', recent, string.format('%d.%06d', time[1], time[2]), ARGV[1])
redis.call('HSET', sizes, ARGV[1], ARGV[2])

for _, expired in ipairs(redis.call('ZRANGEBYSCORE', recent, '-inf', '(' .. (tonumber(time[1]) - tonumber(ARGV[3])))) do
    redis.call('ZREM', recent, expired)
    redis.call('HDEL', sizes, expired)
end

local bytes, leaving = 0, {}
for _, size in ipairs(redis.call('HVALS', sizes)) do
    bytes = bytes + tonumber(size)
end
local count = redis.call('ZCARD', recent)
while count > 1 and (count > tonumber(ARGV[4]) or bytes > tonumber(ARGV[5])) do
    local oldest = redis.call('ZRANGE', recent, 0, 0)[1]
    bytes, count = bytes - tonumber(redis.call('HGET', sizes, oldest) or '0'), count - 1
    redis.call('ZREM', recent, oldest)
    redis.call('HDEL', sizes, oldest)
    leaving[#leaving + 1] = oldest
end
redis.call('EXPIRE', recent, ARGV[3])
redis.call('EXPIRE', sizes, ARGV[3])
return leaving
