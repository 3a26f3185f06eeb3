package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"warmroute/config"
)

// load reads a configuration as `serve --config FILE` followed by args does.
// An empty yaml is no file at all.
func load(t *testing.T, yaml string, args ...string) (*config.Config, error) {
	t.Helper()
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	config.AddFlags(flags)
	if yaml != "" {
		file := filepath.Join(t.TempDir(), "test.yaml")
		if err := os.WriteFile(file, []byte(yaml), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", file)
	}
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return config.Load(defaultConfig, flags, flags.Args())
}

// loadFile loads a configuration that is on disk already.
func loadFile(t *testing.T, path string) (*config.Config, error) {
	t.Helper()
	return load(t, "", "--config", path)
}

// settingVariables returns the environment variables of all settings.
func settingVariables(t *testing.T) map[string]bool {
	t.Helper()
	variables := map[string]bool{}
	var add func(section map[string]any, prefix string)
	add = func(section map[string]any, prefix string) {
		for key, value := range section {
			name := prefix + "_" + strings.ToUpper(key)
			if inner, ok := value.(map[string]any); ok {
				add(inner, name)
			} else {
				variables[name] = true
			}
		}
	}
	var settings map[string]any
	if err := yaml.Unmarshal(defaultConfig, &settings); err != nil {
		t.Fatal(err)
	}
	add(settings, "WARMROUTE")
	return variables
}

func mustLoad(t *testing.T, yaml string, args ...string) *config.Config {
	t.Helper()
	c, err := load(t, yaml, args...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}
