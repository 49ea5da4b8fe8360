"""Which histories stay in this process: least recently used leave when their bytes exceed the budget."""

from collections import Counter, OrderedDict
from weakref import WeakValueDictionary

from agentspec.cache.history import ScopeHistory, TrajectoryHistory
from agentspec.cache.rolling import RollingIndex
from agentspec.config import CacheConfig
from agentspec.types import Scope, Trajectory

BYTES_PER_TOKEN = 128
"""An index's own memory, about: measured 90 to 105 on agent runs."""

Key = tuple[Scope, str]


class Shelf:
    """Histories by trajectory and scope. Belongs to one thread."""

    def __init__(self, config: CacheConfig, reserved_bytes: int) -> None:
        self.budget = max(config.memory_bytes - reserved_bytes, 0)
        self.scope_budget = min(config.scope_bytes, self.budget)
        most = self.scope_budget // (4 * BYTES_PER_TOKEN)
        self.trajectory_tokens = min(config.trajectory_tokens, most)
        self.scope_tokens = min(config.scope_tokens, most)
        self.trajectories: OrderedDict[Key, TrajectoryHistory] = OrderedDict()
        self.left: WeakValueDictionary[Key, TrajectoryHistory] = WeakValueDictionary()
        """Those that made room, for as long as a session or a task still uses them."""

        self.scopes: OrderedDict[Scope, ScopeHistory] = OrderedDict()
        self.sizes: dict[Key | Scope, int] = {}
        self.bytes = 0
        self.bytes_of: Counter[Scope] = Counter()
        self.evictions = 0
        """Histories and scopes that left for others."""

    def find(self, trajectory: Trajectory) -> TrajectoryHistory | None:
        """A trajectory's history, now the most recently used."""
        key = (trajectory.scope, trajectory.id)
        history = self.trajectories.get(key)
        if history is not None:
            self.trajectories.move_to_end(key)
            self.scopes.move_to_end(trajectory.scope)
        return history

    def add(self, trajectory: Trajectory) -> TrajectoryHistory:
        """A new history for a trajectory that has none."""
        history = TrajectoryHistory(self.trajectory_tokens, self.scope(trajectory.scope))
        self.trajectories[trajectory.scope, trajectory.id] = history
        return history

    def scope(self, scope: Scope) -> ScopeHistory:
        """The history of a scope, now the most recently used."""
        if scope not in self.scopes:
            self.scopes[scope] = ScopeHistory(RollingIndex(self.scope_tokens))
        self.scopes.move_to_end(scope)
        return self.scopes[scope]

    def settle(self, trajectory: Trajectory, history: TrajectoryHistory) -> None:
        """Account for what a history and its scope take now, and make room."""
        key = (trajectory.scope, trajectory.id)
        if history.deleted or self.scopes.get(trajectory.scope) is not history.scope:
            return
        if self.trajectories.setdefault(key, history) is history:
            with history.scope.lock:
                self.account(key, history.bytes)
                self.account(trajectory.scope, history.scope.index.bytes)
        self.evict_of(trajectory.scope)
        self.evict()

    def account(self, key: Key | Scope, size: int) -> None:
        """Set the bytes that an entry takes; 0 where it is no more."""
        more = size - self.sizes.pop(key, 0)
        self.bytes += more
        scope = key if isinstance(key, Scope) else key[0]
        self.bytes_of[scope] += more
        if size:
            self.sizes[key] = size
        elif not self.bytes_of[scope]:
            del self.bytes_of[scope]

    def evict_of(self, scope: Scope) -> None:
        """Drop idle trajectories of a scope until its budget is kept; busy ones stay."""
        if self.bytes_of[scope] <= self.scope_budget:
            return
        for key in [key for key, history in self.trajectories.items() if key[0] == scope and not history.busy]:
            self.drop(key)
            self.evictions += 1
            if self.bytes_of[scope] <= self.scope_budget:
                return

    def evict(self) -> None:
        """Drop idle trajectories, then idle scopes, until the budget is kept; busy ones stay."""
        if self.bytes <= self.budget:
            return
        for key in [key for key, history in self.trajectories.items() if not history.busy]:
            self.drop(key)
            self.evictions += 1
            if self.bytes <= self.budget:
                break
        else:
            used = {scope for scope, _ in self.trajectories}
            for scope in [scope for scope in self.scopes if scope not in used]:
                self.drop_scope(scope)
                if self.bytes <= self.budget:
                    break

    def drop(self, key: Key) -> None:
        """A trajectory's history makes room."""
        history = self.trajectories.pop(key, None)
        if history is not None:
            self.left[key] = history
            self.account(key, 0)

    def forget(self, trajectory: Trajectory) -> bool:
        """Keep nothing of a trajectory that was deleted; whether it was here."""
        key = (trajectory.scope, trajectory.id)
        here, left = self.trajectories.pop(key, None), self.left.pop(key, None)
        for history in (here, left):
            if history is not None:
                history.deleted = True
        self.account(key, 0)
        return here is not None

    def drop_scope(self, scope: Scope) -> None:
        """Forget what a scope without trajectories shared."""
        del self.scopes[scope]
        self.account(scope, 0)
        self.evictions += 1
