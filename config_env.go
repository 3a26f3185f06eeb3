package main

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/viper"
)

const (
	envPrefix = "WARMROUTE_"
	// configVariable names the configuration's file. It is no setting.
	configVariable = envPrefix + "CONFIG"
)

// envName is the environment variable of a setting.
func envName(path string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(path, ".", "_"))
}

// bindEnvironment gives every setting its variable and reports those that belong to none.
func bindEnvironment(v *viper.Viper, settings map[string]string, known []string, f *faults) {
	// Kubernetes, and Docker's links, put these into the environment of every
	// container that runs beside a service named warmroute.
	service := regexp.MustCompile(`_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$`)
	v.AllowEmptyEnv(true) // WARMROUTE_ADMIN= turns the admin listener off
	variables := map[string]string{}
	for _, path := range known {
		variables[envName(path)] = path
		v.MustBindEnv(settings[path], envName(path))
	}
	names := slices.Sorted(maps.Keys(variables))
	for _, assignment := range slices.Sorted(slices.Values(os.Environ())) {
		name, _, _ := strings.Cut(assignment, "=")
		if path, ok := variables[name]; ok {
			f.origin[path] = name
			continue
		}
		if !strings.HasPrefix(name, envPrefix) || name == configVariable || service.MatchString(name) {
			continue
		}
		if near := nearest(name, names); near != "" {
			f.add(name, "unknown variable; did you mean %s?", near)
		} else {
			f.add(name, "unknown variable; it is %s and the setting's path, as in %s", envPrefix, envName("routing.policy"))
		}
	}
}
