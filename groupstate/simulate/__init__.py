"""Everything that can go wrong, on purpose and repeatable: a virtual clock, faulty disks, seeded runs."""
