"""What runs do, before and after: `explain` looks ahead."""
