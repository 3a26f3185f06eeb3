package main

import "path/filepath"

func (c *Config) checkAccessLog(f *faults) {
	oneOf(f, "access_log.format", c.AccessLog.Format, "json", "text")
	within(f, "access_log.sample", c.AccessLog.Sample, 0, 1)
	for _, other := range []struct{ path, file string }{{"record.file", c.Record.File}, {"index.snapshot", c.Index.Snapshot}} {
		if c.AccessLog.File != "" && other.file != "" && filepath.Clean(c.AccessLog.File) == filepath.Clean(other.file) {
			f.add("access_log.file", "%s is %s as well; give one of the two another file", c.AccessLog.File, other.path)
		}
	}
}
