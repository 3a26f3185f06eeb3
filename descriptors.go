package main

import "fmt"

// spareDescriptors are for listeners, files, name servers and the admin's clients.
const spareDescriptors = 100

// descriptors is how many the settings allow to be open at once: a client's
// connection and a replica's for each request, clients' idle connections, and a
// check and a scrape of each replica.
func (c *Config) descriptors() uint64 {
	towards := min(c.Limits.InFlight, len(c.Backends)*c.Connections.MaxPerBackend)
	return uint64(max(c.Limits.Connections, c.Limits.InFlight) + towards + 2*len(c.Backends) + spareDescriptors)
}

// descriptorWarning says that the process may open fewer than it needs, or "".
func (c *Config) descriptorWarning(most uint64) string {
	need := c.descriptors()
	if need <= most {
		return ""
	}
	return fmt.Sprintf("limits.in_flight %d and limits.connections %d need up to %d descriptors, and this process may open %d: "+
		"raise it to %d (ulimit -n, systemd's LimitNOFILE=, Docker's --ulimit nofile=), or lower the two",
		c.Limits.InFlight, c.Limits.Connections, need, most, need)
}

// startWarnings lists what is allowed but seldom meant, of the configuration and
// of this process's limits.
func (c *Config) startWarnings() []string {
	warnings := c.Warnings()
	if most, known := descriptorLimit(); known {
		if w := c.descriptorWarning(most); w != "" {
			warnings = append(warnings, w)
		}
	}
	return warnings
}
