"""What any part of a rank may use: process, clock, state, counters, profiles."""
