-- The chunks of a trajectory that were added after one that the caller knows.
--
-- KEYS[1] chunks (list)
-- ARGV[1] the known chunk's id, its 8 bytes as they stand in the chunk; empty for none   ARGV[2] most chunks
--
-- Returns the newest chunks, oldest first: all of them where the known one is gone.

if ARGV[1] ~= '' then
    for back = 1, tonumber(ARGV[2]) do
        local chunk = redis.call('LINDEX', KEYS[1], -back)
        if not chunk then
            break
        end
        if string.sub(chunk, 3, 10) == ARGV[1] then
            if back == 1 then
                return {}
            end
            return redis.call('LRANGE', KEYS[1], 1 - back, -1)
        end
    end
end
return redis.call('LRANGE', KEYS[1], -tonumber(ARGV[2]), -1)
