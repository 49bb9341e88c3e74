"""What benchmarks of real engines share: contestants, partners without a model, cores, timers."""
