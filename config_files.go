package main

import "slices"

// readFiles reads the files that the settings name, each once.
func (c *Config) readFiles(f *faults) {
	c.readKeysFile(f)
	c.readAdminToken(f)
	c.TLS.readCertificate(f, "tls")
	c.AdminTLS.readCertificate(f, "admin_tls")
	c.readAuthorities(f)
}

// files are those that have to be read again when they change, the
// configuration's own included.
func (c *Config) files(own string) []string {
	all := []string{own, c.KeysFile, c.AdminTokenFile, c.TLS.CertFile, c.TLS.KeyFile, c.AdminTLS.CertFile, c.AdminTLS.KeyFile}
	for _, b := range c.Backends {
		all = append(all, b.CAFile)
	}
	return slices.DeleteFunc(all, func(name string) bool { return name == "" })
}
