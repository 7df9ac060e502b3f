"""What ranks tell each other: lengths, samples, plans' digests, and failures."""
