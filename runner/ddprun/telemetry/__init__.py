"""What a run tells about itself: clocks, step and bucket records, events, progress, the summary."""
