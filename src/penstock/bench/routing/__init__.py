"""Records how routers choose experts, replays that against slots, and imposes it on other shapes."""
