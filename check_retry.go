package main

import "time"

func (c *Config) checkRetry(f *faults) {
	within(f, "retry.share", c.Retry.Share, 0, 1)
	within(f, "retry.per_second", c.Retry.PerSecond, 0, 1<<20)
	within(f, "breaker.failures", c.Breaker.Failures, 0, 1<<20)
	if c.Breaker.Failures > 0 && c.Breaker.Open < 10*time.Millisecond {
		f.add("breaker.open", "%v is too short; give it 10ms or more, or set breaker.failures to 0 for no breaker", c.Breaker.Open)
	}
}
