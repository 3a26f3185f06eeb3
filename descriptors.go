package main

import "fmt"

// spareFileDescriptors are for listeners, files, name servers and admin clients.
const spareFileDescriptors = 100

// maxFileDescriptors returns how many the settings allow to be open at once: a client's
// connection and a backend's for each request, clients' idle connections, and a
// health check and a scrape of each backend.
func (c *Config) maxFileDescriptors() uint64 {
	toBackends := min(c.Limits.InFlight, len(c.Backends)*c.Connections.MaxPerBackend)
	return uint64(max(c.Limits.Connections, c.Limits.InFlight) + toBackends + 2*len(c.Backends) + spareFileDescriptors)
}

// startWarnings lists what is allowed but seldom meant, of the configuration and
// of a process that may have limit files open (0: unknown).
func (c *Config) startWarnings(limit uint64) []string {
	warnings := c.Warnings()
	if need := c.maxFileDescriptors(); limit > 0 && need > limit {
		warnings = append(warnings, fmt.Sprintf("may need %d file descriptors, limit is %d: raise it (ulimit -n, systemd's LimitNOFILE=, "+
			"Docker's --ulimit nofile=), or lower limits.connections and limits.in_flight", need, limit))
	}
	return warnings
}
