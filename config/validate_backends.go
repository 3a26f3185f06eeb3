package config

import (
	"fmt"
	"net"
	"strings"

	"warmroute/backends"
	"warmroute/kvevents/wire"
)

// setDefaultBackendNames gives each backend without a name its default one: host, port and path of its URL.
func (c *Config) setDefaultBackendNames() {
	for i := range c.Backends {
		b := &c.Backends[i]
		if u, err := b.ParseURL(); b.Name == "" && err == nil {
			if b.Name = backends.DefaultName(u); b.HasDNSScheme() && u.Port() == "" {
				b.Name = u.Host // the ports are in SRV records
			}
		}
	}
}

// validateBackends validates each backend, and that names and addresses are unique.
func (c *Config) validateBackends(errs *errorList) {
	if len(c.Backends) == 0 && c.BackendsFile == "" && c.StateFile == "" && !c.Registration.IsOnPublicListener() &&
		!errs.hasAny("backends_file", "state_file", "registration.listener") {
		errs.add("backends", "the list is empty; name at least one vLLM server, as in serve http://127.0.0.1:8000, or list backends in the "+
			"file; it may be empty with backends_file, state_file or registration")
	}
	firstName, firstURL := map[string]string{}, map[string]string{}
	for i, b := range c.Backends {
		at := c.backendPath(i)
		if errs.hasAny(at, at+".url", at+".name", at+".api_key", at+".ca_file", at+".server_name", at+".max_in_flight", at+".weight",
			at+".device", at+".role", at+".engine_priority", at+".kv_events", at+".kv_replay", at+".dns", at+".ranks") {
			continue
		}
		if !IsHeaderValue(b.APIKey) {
			errs.add(at+".api_key", "contains characters that are not allowed in a header; does it end with a line break?")
		}
		if b.URL == "" {
			errs.add(at+".url", "is missing; set a URL such as http://10.0.0.5:8000")
			continue
		}
		u, err := b.ParseURL()
		if err != nil {
			errs.add(at+".url", "%v", err)
			continue
		}
		validateBackendTLS(errs, at, u.Scheme, b)
		validateKVEvents(errs, at, u.Hostname(), b)
		validateTags(errs, b, at+".")
		if !isBackendName(b.Device) {
			errs.add(at+".device", "%q is not a valid name: use letters, digits and ._:-, at most %d of them", b.Device, maxBackendName)
		}
		if !isBackendName(b.Name) {
			errs.add(at+".name", "%q is not a valid name; it is used in headers and labels: use letters, digits and ._:-", b.Name)
			continue
		}
		address := backends.NormalizeURL(u)
		if first, taken := firstURL[address]; taken {
			errs.add(at+".url", "%s is already %s; remove one of the two", address, first)
		} else {
			firstURL[address] = at
		}
		if first, taken := firstName[b.Name]; taken {
			errs.add(at+".name", "%s is already the name of %s; rename one of the two", b.Name, first)
		} else {
			firstName[b.Name] = at
		}
	}
}

const maxBackendName = 200 // bytes

// isBackendName reports whether s can be the name of a backend or of a device, or is "".
func isBackendName(s string) bool {
	return IsHeaderValue(s) && !strings.ContainsAny(s, " ,") && len(s) <= maxBackendName
}

// validateKVEvents validates where the backend at path publishes KV events.
func validateKVEvents(errs *errorList, path, host string, b Backend) {
	check := func(setting, endpoint string) {
		if _, err := wire.ConfiguredSources(endpoint, "", "", host, 1); err != nil {
			errs.add(path+setting, "%v; use auto, listen, off, or an address such as tcp://10.0.0.5:5557", err)
		}
	}
	switch b.KVEvents {
	case backends.KVEventsAuto, backends.KVEventsOff:
		if b.KVReplay != "" {
			errs.add(path+".kv_replay", "has no effect with kv_events: %s; set kv_events to the replica's endpoint as well, such as "+
				"tcp://10.0.0.5:5557", b.KVEvents)
		}
		return
	case backends.KVEventsListen:
	default:
		check(".kv_events", b.KVEvents)
	}
	if b.KVReplay != "" {
		check(".kv_replay", b.KVReplay)
	}
}

// validateKVEventListener validates where publishers of KV events can connect, and that they can if a backend's do.
func (c *Config) validateKVEventListener(errs *errorList) {
	if !errs.hasAny("kv_events.listen", "kv_events.ports") {
		if _, err := c.KVEvents.Addresses(); err != nil {
			errs.add("kv_events.listen", "%v; use an address such as tcp://10.0.0.2:5557, or tcp://*:5557 for all interfaces", err)
		}
	}
	for i, b := range c.Backends {
		if b.KVEvents == backends.KVEventsListen && c.KVEvents.Listen == "" {
			errs.add(c.backendPath(i)+".kv_events", "is listen, but the proxy listens nowhere: set kv_events.listen, such as tcp://10.0.0.2:5557")
		}
	}
}

// kvEventWarnings returns a warning if more than a private network can publish KV events.
func (c *Config) kvEventWarnings() []string {
	addresses, err := c.KVEvents.Addresses()
	if err != nil || len(addresses) == 0 {
		return nil
	}
	host, _, _ := net.SplitHostPort(addresses[0])
	ip := net.ParseIP(host)
	if !isWildcard(host) && (ip == nil || ip.IsLoopback() || ip.IsPrivate() || ip.IsLinkLocalUnicast()) {
		return nil
	}
	return []string{fmt.Sprintf("kv_events.listen: %s is reachable from other networks: any peer can report blocks as cached "+
		"by a replica; set a loopback or private address, or let a firewall admit the replicas only", c.KVEvents.Listen)}
}

// validateBackendTLS validates the TLS settings of the backend at path. scheme is that of its URL.
func validateBackendTLS(errs *errorList, path, scheme string, b Backend) {
	for _, setting := range []struct{ path, value string }{{path + ".ca_file", b.CAFile}, {path + ".server_name", b.ServerName}} {
		if setting.value != "" && scheme != "https" {
			errs.add(setting.path, "has no effect on %s; use https:// or remove it", b.URL)
		}
	}
	if strings.ContainsFunc(b.ServerName, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' || r == ':' }) {
		errs.add(path+".server_name", "%q is not a host name; use the one in the replica's certificate, without scheme and port", b.ServerName)
	}
	if errs.hasAny(path + ".ca_file") {
		return
	}
	if _, err := b.TLSConfig(); err != nil {
		errs.add(path+".ca_file", "%v", err)
	}
}
