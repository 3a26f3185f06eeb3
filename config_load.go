package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"

	"warmroute/router/policy"
)

const (
	// maxFileBytes is far above any real file of settings, keys or certificates, those
	// of all public authorities included; beyond it somebody named the wrong one.
	maxFileBytes = 1 << 20

	// pathSeparator is what viper splits paths on. Paths are shown with a dot,
	// but a dot may be part of a key, which must not then reach another setting.
	pathSeparator = "\x00"
)

// addConfigFlags defines the flags that loadConfig reads. Their defaults stay
// empty: config.yaml has them.
func addConfigFlags(flags *pflag.FlagSet) {
	flags.SortFlags = false
	flags.String("config", "", "configuration `FILE`, else the one that WARMROUTE_CONFIG names; every setting and its default is in config.yaml")
	flags.String("listen", "", "`ADDRESS` for OpenAI clients, like :8080 or 127.0.0.1:8080")
	flags.String("admin", "", "`ADDRESS` for metrics and operations, \"\" for none")
	flags.String("policy", "", "routing `POLICY`: "+strings.Join(policy.Names(), ", "))
	flags.String("log-level", "", "least `LEVEL` that is logged: debug, info, warn or error")
}

// flagSettings says which setting each flag gives.
func flagSettings() map[string]string {
	return map[string]string{
		"listen":    "listen",
		"admin":     "admin",
		"policy":    "routing.policy",
		"log-level": "log.level",
	}
}

// loadConfig reads the defaults, then the file that --config names, then the
// environment, then the flags that addConfigFlags defined, each over the one
// before; urls, when there are any, are the backends. Its error is a
// ConfigError with every fault; what could be read is returned all the same, for
// the files that it names.
func loadConfig(flags *pflag.FlagSet, urls []string) (*Config, error) {
	path, err := configPath(flags)
	if err != nil {
		return nil, err
	}
	if path == "" {
		return parseConfig("", nil, flags, urls)
	}
	data, err := readOnce(path)
	if err != nil {
		flag := "--config"
		if given, _ := flags.GetString("config"); given == "" {
			flag = configVariable
		}
		return nil, ConfigError{cannotRead(flag, path, err).Error()}
	}
	return parseConfig(path, data, flags, urls)
}

// configPath is the configuration's file, "" for none. A variable may name it, so
// that a container's health check finds the file that its server has.
func configPath(flags *pflag.FlagSet) (string, error) {
	path, err := flags.GetString("config")
	return cmp.Or(path, os.Getenv(configVariable)), err
}

// readFile reads a file that the configuration names.
func readFile(path string) ([]byte, error) {
	if err := plainFile(path); err != nil {
		return nil, err
	}
	return readOnce(path)
}

// plainFile refuses what is there but no plain file: a pipe has its content only
// once, and holds up whoever opens it.
func plainFile(path string) error {
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no plain file", path)
	}
	return err
}

// readOnce reads what may be a pipe.
func readOnce(path string) ([]byte, error) {
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

// parseConfig is loadConfig for a file that was read already.
func parseConfig(file string, data []byte, flags *pflag.FlagSet, urls []string) (*Config, error) {
	v := viper.NewWithOptions(viper.KeyDelimiter(pathSeparator))
	v.SetConfigType("yaml")
	if err := v.ReadConfig(bytes.NewReader(defaultsYAML)); err != nil {
		return nil, fmt.Errorf("the built-in config.yaml: %w", err)
	}
	settings := map[string]string{} // shown path → viper's
	for _, key := range v.AllKeys() {
		settings[strings.ReplaceAll(key, pathSeparator, ".")] = key
	}
	known := slices.Sorted(maps.Keys(settings))

	f := faults{origin: map[string]string{}}
	given, err := decodeYAML(data)
	if err != nil {
		f.addYAMLFaults(file, data, known, err)
		return nil, f.err()
	}
	mergeFile(v, given, nil, known, &f)
	bindEnvironment(v, settings, known, &f)
	for flag, setting := range flagSettings() {
		if fl := flags.Lookup(flag); fl != nil && fl.Changed {
			v.Set(settings[setting], fl.Value.String())
			f.origin[setting] = "--" + flag
		}
	}
	if len(urls) > 0 {
		if list, ok := given["backends"].([]any); ok && len(list) > 0 {
			f.add("backends", "%s lists backends and the command line names URLs; drop one of the two", file)
		}
		v.Set("backends", urls)
		f.origin["backends"] = "the command line"
	}

	var c Config
	f.addDecodeFaults(v.UnmarshalExact(&c, viper.DecodeHook(decodeValue)))
	c.nameBackends()
	c.readFiles(&f)
	c.check(&f)
	return &c, f.err()
}

// decodeYAML reads one document. Aliases cannot blow it up: the parser refuses
// a document that is mostly made of them.
func decodeYAML(data []byte) (map[string]any, error) {
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var given map[string]any
	if err := decoder.Decode(&given); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	var next yaml.Node
	if err := decoder.Decode(&next); err == nil {
		return nil, fmt.Errorf("line %d: a second document begins; only one is read", next.Line)
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	return given, nil
}

// mergeFile lays what the file gives over the defaults, setting by setting.
func mergeFile(v *viper.Viper, given map[string]any, section []string, known []string, f *faults) {
	for _, key := range slices.Sorted(maps.Keys(given)) {
		at := append(slices.Clone(section), key)
		path := strings.Join(at, ".")
		inner, isSection := given[key].(map[string]any)
		isSetting := slices.Contains(known, path) && !strings.Contains(key, ".")
		switch {
		case isSetting && given[key] == nil:
			f.add(path, "has no value; give it one or delete the line")
		case isSetting:
			var nested any = given[key]
			for _, k := range slices.Backward(at) {
				nested = map[string]any{k: nested}
			}
			// MergeConfigMap returns an error for form's sake only.
			_ = v.MergeConfigMap(nested.(map[string]any))
		case isSection:
			mergeFile(v, inner, at, known, f)
		default:
			if inside := settingsIn(path, known); len(inside) == 0 || strings.Contains(key, ".") {
				f.add(path, "%s", unknownSetting(path, key, known))
			} else if given[key] != nil { // a section whose lines are all commented out is fine
				f.add(path, "is a section; it holds %s", strings.Join(inside, ", "))
			}
		}
	}
}

// settingsIn lists the settings of a section.
func settingsIn(section string, known []string) []string {
	var inside []string
	for _, k := range known {
		if strings.HasPrefix(k, section+".") {
			inside = append(inside, k)
		}
	}
	return inside
}

// unknownSetting says what to do about a path that is no setting.
func unknownSetting(path, key string, known []string) string {
	if slices.Contains(known, path) {
		parts := strings.Split(path, ".")
		written := fmt.Sprintf("%q", parts[0]+":")
		for _, part := range parts[1:] {
			written += fmt.Sprintf(" and below it, indented, %q", part+":")
		}
		return fmt.Sprintf("write it in %d lines, %s", len(parts), written)
	}
	near := nearest(strings.ToLower(path), known)
	for _, k := range known {
		if near == "" && strings.HasSuffix(k, "."+key) {
			near = k
		}
	}
	if near == "" {
		return "unknown setting; config.yaml has them all"
	}
	return "unknown setting; did you mean " + near + "?"
}
