package config

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"warmroute/proxy/apikey"
)

// maxFileBytes bounds a configuration, key or certificate file. It is far above
// any real one, bundles of all public authorities included.
const maxFileBytes = 1 << 20

// ReadFileOrPipe reads a file of at most 1 MiB, which may be a pipe.
func ReadFileOrPipe(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxFileBytes+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxFileBytes {
		return nil, fmt.Errorf("%s: larger than %d bytes; is it the right file?", path, maxFileBytes)
	}
	return data, nil
}

// ReadRegularFile reads a file of at most 1 MiB. It fails if the file is not a regular one.
func ReadRegularFile(path string) ([]byte, error) {
	if err := CheckRegular(path); err != nil {
		return nil, err
	}
	return ReadFileOrPipe(path)
}

// CheckRegular returns an error unless path is a regular file. A pipe can be read
// only once, and blocks the process that opens it.
func CheckRegular(path string) error {
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	return err
}

// WatchedFiles returns the paths of the files to watch for changes: configFile and
// those that the settings name. configFile may be empty.
func (c *Config) WatchedFiles(configFile string) []string {
	all := []string{configFile, c.BackendsFile, c.Registration.TokenFile, c.KeysFile, c.AdminTokenFile, c.TLS.CertFile, c.TLS.KeyFile,
		c.AdminTLS.CertFile, c.AdminTLS.KeyFile}
	for _, b := range c.Backends {
		all = append(all, b.CAFile)
	}
	return slices.DeleteFunc(all, func(name string) bool { return name == "" })
}

func (c *Config) readFiles(errs *errorList) {
	c.readKeysFile(errs)
	c.AdminTokenSource = cmp.Or(errs.origin["admin_token"], "the setting admin_token")
	switch {
	case c.AdminToken != "" && c.AdminTokenFile != "":
		errs.add("admin_token_file", "admin_token is given as well; remove one of the two")
	case c.AdminToken == "" && isAbsent(c.AdminTokenFile): // serve creates it
		checkCreatable(errs, "admin_token_file", c.AdminTokenFile)
	case c.AdminToken == "":
		c.AdminToken, c.AdminTokenSource = readSecret(errs, "admin_token_file", c.AdminTokenFile, "the token"), c.AdminTokenFile
	}
	c.TLS.readCertificate(errs, "tls")
	c.AdminTLS.readCertificate(errs, "admin_tls")
	for i := range c.Backends {
		b := &c.Backends[i]
		// Validation reports a ca_file for another scheme.
		if u, err := b.ParseURL(); err == nil && u.Scheme == "https" {
			b.CA = readFile(errs, c.backendPath(i)+".ca_file", b.CAFile)
		}
	}
	c.Registration.Token = readSecret(errs, "registration.token_file", c.Registration.TokenFile, "the token")
	c.Redis.Password = readSecret(errs, "redis.password_file", c.Redis.PasswordFile, "the password")
	c.Redis.Secret = readSecret(errs, "redis.secret_file", c.Redis.SecretFile, "a secret")
	c.Redis.CA = readFile(errs, "redis.ca_file", c.Redis.CAFile)
}

// AdminTokenMissing reports whether admin_token_file names a file that did not exist when the configuration was loaded.
func (c *Config) AdminTokenMissing() bool { return c.AdminTokenFile != "" && c.AdminToken == "" }

func isAbsent(file string) bool {
	_, err := os.Stat(file)
	return file != "" && errors.Is(err, fs.ErrNotExist)
}

// readFile returns the content of the file that a setting names, "" if it names none.
func readFile(errs *errorList, setting, file string) string {
	if file == "" {
		return ""
	}
	data, err := ReadRegularFile(file)
	if err != nil {
		errs.add(setting, "%v", err)
	}
	return string(data)
}

// readSecret returns the trimmed content of the file that a setting names, or "" if it names none.
// what describes the content in errors.
func readSecret(errs *errorList, setting, file, what string) string {
	secret := strings.TrimSpace(readFile(errs, setting, file))
	if file != "" && secret == "" {
		errs.add(setting, "%s is empty; put %s into it", file, what)
	}
	return secret
}

// readKeysFile adds the keys of keys_file, if it is given, to those of the list.
func (c *Config) readKeysFile(errs *errorList) {
	content := readFile(errs, "keys_file", c.KeysFile)
	if c.KeysFile == "" || errs.hasAny("keys_file") {
		return
	}
	secrets, invalid := apikey.ParseFile(content)
	for _, err := range invalid {
		line, _, _ := strings.Cut(err.Error(), ":")
		errs.add(c.KeysFile+": "+line, "%v", errors.Unwrap(err))
	}
	if len(secrets) == 0 && len(invalid) == 0 {
		errs.add("keys_file", "%s contains no keys; add one, or remove the setting to allow access without a key", c.KeysFile)
	}
	index := map[string]int{}
	for i, k := range c.Keys {
		if _, listed := index[k.Name]; !listed {
			index[k.Name] = i
		}
	}
	for _, s := range secrets {
		i, listed := index[s.Name]
		if !listed {
			i = len(c.Keys)
			index[s.Name] = i
			c.Keys = append(c.Keys, Key{Key: apikey.Key{Name: s.Name}})
		}
		c.Keys[i].secrets = append(c.Keys[i].secrets, s)
	}
}

// readCertificate reads the certificate and its key. section is "tls" or "admin_tls".
func (t *ListenerTLS) readCertificate(errs *errorList, section string) {
	certFile, keyFile := section+".cert_file", section+".key_file"
	switch {
	case t.CertFile == "" && t.KeyFile != "":
		errs.add(certFile, "is missing, but %s is given; give both or neither", keyFile)
	case t.CertFile != "" && t.KeyFile == "":
		errs.add(keyFile, "is missing, but %s is given; give both or neither", certFile)
	}
	chain, key := readFile(errs, certFile, t.CertFile), readFile(errs, keyFile, t.KeyFile)
	if t.CertFile == "" || errs.hasAny(certFile, keyFile) {
		return
	}
	pair, err := tls.X509KeyPair([]byte(chain), []byte(key))
	if err != nil {
		errs.add(keyFile, "%s with the certificate in %s: %v", t.KeyFile, t.CertFile, err)
		return
	}
	t.Certificate = &pair
}
