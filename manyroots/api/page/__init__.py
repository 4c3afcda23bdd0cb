"""The page at `/`: what the cache, the scheduler and the adapters do, live."""
