"""Values that cross modules and processes; standard library and msgspec only."""
