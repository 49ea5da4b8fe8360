"""Token histories of trajectories and the indexes that retrieve drafts from them."""
