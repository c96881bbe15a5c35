"""What is played when: environments in their shares, tasks by how often they are solved, horizons that grow."""
