-- What is left of deleted evaluations. Set `eval_deleting` holds their numbers until nothing is.

-- @include tasks

local Burial = {}

-- Ends the lease of a task that is deleted.
function Burial.drop_lease(task)
  local member = Tasks.entry(Evaluations.task_id_of(task.evaluation, task.number, task.index), task)
  call('ZREM', key('eval_leases'), member)
  call('SREM', key('held:' .. task.worker), member)
end

-- Empties up to about `limit` tasks of deleted evaluations; their results go to trash. Returns how many.
function Burial.bury(limit)
  local done = 0
  while done < limit do
    local number = call('SRANDMEMBER', key('eval_deleting'))
    if not number then
      return done
    end
    local tasks = key('eval_tasks:' .. number)
    local indexes = call('HRANDFIELD', tasks, limit - done)
    if #indexes > 0 then
      for _, raw in ipairs(call('HMGET', tasks, unpack(indexes))) do
        local task = unpack_msg(raw)
        Tasks.trash(task.body)
        if task.state == 'leased' then
          Burial.drop_lease(task)
        end
      end
      call_many('HDEL', tasks, indexes)
    end
    if call('EXISTS', tasks) == 0 then
      for _, kind in ipairs({'specs', 'pending', 'ended'}) do
        call('UNLINK', key('eval_' .. kind .. ':' .. number))
      end
      call('HDEL', key('eval_manifests'), number)
      call('SREM', key('eval_deleting'), number)
    end
    done = done + #indexes + 1
  end
  return done
end
