package config

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"

	"warmroute/backends"
)

// ParseAddedBackend reads a replica that is added while the proxy runs: a JSON object with the settings of an element
// of backends, of which url is required. It needs no file and holds no secret. The error is an Errors.
func ParseAddedBackend(data []byte) (Backend, error) {
	values, err := decodeYAML(data) // JSON is YAML, and its numbers keep their type
	if err != nil {
		return Backend{}, Errors{"the body is not a JSON object such as {\"url\": \"http://10.0.0.5:8000\"}"}
	}
	for _, name := range []string{"api_key", "ca_file", "server_name"} {
		if _, given := values[name]; given {
			return Backend{}, Errors{name + ": is only for backends of the configuration and of backends_file; list the replica there"}
		}
	}
	var c Config
	var errs errorList
	errs.addDecodeErrors(decodeSettings(map[string]any{"backends": []any{values}}, &c))
	if err := relativeErrors(errs.err()); err != nil {
		return Backend{}, err
	}
	c.Backends[0].Source = backends.FromRegistration
	c.setDefaultBackendNames()
	c.validateBackends(&errs)
	return c.Backends[0], relativeErrors(errs.err())
}

// relativeErrors returns errors with the paths of settings below backends[0].
func relativeErrors(err error) error {
	var list Errors
	if !errors.As(err, &list) {
		return err
	}
	list = slices.Clone(list)
	for i, line := range list {
		line = strings.TrimPrefix(line, "backends[0]")
		list[i] = strings.TrimPrefix(strings.TrimPrefix(line, "."), ": ")
	}
	return list
}

// FormatAddedBackend returns the settings of a backend as JSON, which ParseAddedBackend reads.
func FormatAddedBackend(b Backend) ([]byte, error) {
	settings := map[string]any{}
	for _, s := range settingsOf(reflect.ValueOf(b), "", false) {
		if !s.value.IsZero() {
			settings[s.name] = s.value.Interface()
		}
	}
	return json.Marshal(settings)
}
