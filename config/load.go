package config

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"

	"warmroute/router/policy"
)

const (
	envPrefix = "WARMROUTE"

	// FileVariable is the environment variable that names the configuration file. It is not a setting.
	FileVariable = envPrefix + "_CONFIG"
)

// Loader loads configurations.
type Loader struct {
	Defaults []byte          // the content of the built-in config.yaml
	Policies policy.Registry // that routing.policy may name beside prefix

	// ReplaceBackends makes the URLs that are passed to Load replace the backends of the file. Else both are an error.
	ReplaceBackends bool
}

// AddFlags defines the flags that Load reads. Their values are empty unless given,
// since the defaults are in config.yaml; the help repeats these.
func (l Loader) AddFlags(flags *pflag.FlagSet) {
	flags.SortFlags = false
	flags.String("config", "", "read the configuration from `FILE` (default: $WARMROUTE_CONFIG); config.yaml documents all settings")
	flags.String("listen", "", "listen on `ADDRESS` for clients (default :8080)")
	flags.String("admin", "", "listen on `ADDRESS` for metrics and operators; \"\" disables it (default 127.0.0.1:9090)")
	flags.String("policy", "", "routing `POLICY`: "+strings.Join(l.Policies.Names(), ", ")+" (default prefix)")
	flags.String("log-level", "", "minimum log `LEVEL`: debug, info, warn or error (default info)")
}

// flagSettings returns the path of the setting that each flag of AddFlags sets.
func flagSettings() map[string]string {
	return map[string]string{
		"listen":    "listen",
		"admin":     "admin",
		"policy":    "routing.policy",
		"log-level": "log.level",
	}
}

// Load reads the configuration: the defaults, then the file that --config or WARMROUTE_CONFIG names, then the environment,
// then the flags that AddFlags defined. Each overrides the one before. urls, if
// any, are the backends.
//
// The error is an Errors. Where the file could be parsed, Load returns the configuration along with the error.
func (l Loader) Load(flags *pflag.FlagSet, urls []string) (*Config, error) {
	path, err := FilePath(flags)
	if err != nil {
		return nil, err
	}
	if path == "" {
		return l.parse("", nil, flags, urls)
	}
	data, err := ReadFileOrPipe(path)
	if err != nil {
		source := "--config"
		if given, _ := flags.GetString("config"); given == "" {
			source = FileVariable
		}
		return nil, Errors{explainReadError(source, path, err).Error()}
	}
	return l.parse(path, data, flags, urls)
}

// LoadWithoutFile is Load, but ignores the configuration file.
func (l Loader) LoadWithoutFile(flags *pflag.FlagSet, urls []string) (*Config, error) {
	return l.parse("", nil, flags, urls)
}

// FilePath returns the path of the configuration file, or "" for none: the one
// that --config or else WARMROUTE_CONFIG names.
func FilePath(flags *pflag.FlagSet) (string, error) {
	path, err := flags.GetString("config")
	return cmp.Or(path, os.Getenv(FileVariable)), err
}

// parse is Load for a file that was already read.
func (l Loader) parse(file string, data []byte, flags *pflag.FlagSet, urls []string) (*Config, error) {
	defaults, err := decodeYAML(l.Defaults)
	if err != nil {
		return nil, fmt.Errorf("built-in config.yaml: %w", err)
	}
	var known []string // paths of settings
	for _, s := range settingsOf(reflect.ValueOf(Config{}), "", false) {
		known = append(known, s.path)
	}
	slices.Sort(known)
	errs := errorList{origin: map[string]string{}}
	given, err := decodeYAML(data)
	if err != nil {
		errs.addYAMLErrors(file, data, known, err)
		return nil, errs.err()
	}
	v := viper.NewWithOptions(viper.EnvKeyReplacer(newVariableReplacer(known)))
	v.SetEnvPrefix(envPrefix)
	v.AllowEmptyEnv(true) // WARMROUTE_ADMIN= turns the admin listener off
	v.AutomaticEnv()
	for _, settings := range []map[string]any{defaults, given} {
		if err := v.MergeConfigMap(selectSettings(settings, "", known, &errs)); err != nil {
			return nil, err
		}
	}
	checkEnvironment(known, &errs)
	for name, setting := range flagSettings() {
		// BindPFlag fails only for nil: a flag that the command does not have.
		if flag := flags.Lookup(name); v.BindPFlag(setting, flag) == nil && flag.Changed {
			errs.origin[setting] = "--" + name
		}
	}
	if len(urls) > 0 {
		if list, ok := given["backends"].([]any); ok && len(list) > 0 && !l.ReplaceBackends {
			errs.add("backends", "both %s and the command line list backends; remove one of the two lists", file)
		}
		v.Set("backends", urls)
		errs.origin["backends"] = "the command line"
	}

	var c Config
	errs.addDecodeErrors(v.UnmarshalExact(&c, viper.DecodeHook(decodeValue)))
	c.readBackendsFile(&errs)
	c.setDefaultBackendNames()
	c.readFiles(&errs)
	c.validate(&errs, l.Policies)
	return &c, errs.err()
}

// verbatim is a value of a file in the form in which viper leaves it as it is. In maps, also in those in lists, viper
// changes keys to lower case, and it takes the keys of a map for parts of the paths of settings.
type verbatim struct{ value any }

// selectSettings returns the settings of a file, or of one of its sections, each verbatim, and adds an error for each
// key that is not one. prefix is the beginning of their paths.
func selectSettings(given map[string]any, prefix string, known []string, errs *errorList) map[string]any {
	settings := map[string]any{}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		path := prefix + key
		inner, isSection := given[key].(map[string]any)
		isSetting := slices.Contains(known, path) && !strings.Contains(key, ".")
		switch {
		case renamedSettings[strings.ToLower(path)] != "":
			addUnknownSetting(errs, path, key, known)
		case isSetting && given[key] == nil:
			errs.add(path, "has no value; give it one or delete the line")
		case isSetting:
			settings[key] = verbatim{given[key]}
		case isSection && (len(settingsIn(path, known)) > 0 || nearestWord(strings.ToLower(path), known) == ""):
			if inner := selectSettings(inner, path+".", known, errs); len(inner) > 0 { // else Poll could replace poll
				settings[key] = inner
			}
		default:
			if inside := settingsIn(path, known); len(inside) == 0 || strings.Contains(key, ".") {
				addUnknownSetting(errs, path, key, known)
			} else if given[key] != nil { // a section whose lines are all commented out is fine
				errs.add(path, "is a section; it contains %s", strings.Join(inside, ", "))
			}
		}
	}
	return settings
}

// settingsIn returns the paths of the settings of a section.
func settingsIn(section string, known []string) []string {
	var inside []string
	for _, k := range known {
		if strings.HasPrefix(k, section+".") {
			inside = append(inside, k)
		}
	}
	return inside
}

// addUnknownSetting records the error of a path that is not a setting, whose last part is key.
func addUnknownSetting(errs *errorList, path, key string, known []string) {
	if slices.Contains(known, path) {
		parts := strings.Split(path, ".")
		written := fmt.Sprintf("%q", parts[0]+":")
		for _, part := range parts[1:] {
			written += fmt.Sprintf(" and below it, indented, %q", part+":")
		}
		errs.add(path, "write it in %d lines, %s", len(parts), written)
		return
	}
	if now, renamed := renamedSettings[strings.ToLower(path)]; renamed {
		errs.addUnknown(path, now, "was renamed; use %s", now)
		return
	}
	near := nearestWord(strings.ToLower(path), known)
	for _, k := range known {
		if near == "" && strings.HasSuffix(k, "."+key) {
			near = k
		}
	}
	advice := "config.yaml lists all settings"
	if near != "" {
		advice = "did you mean " + near + "?"
	}
	errs.addUnknown(path, near, "unknown setting; %s", advice)
}

func envName(path string) string {
	return envPrefix + "_" + strings.ToUpper(strings.ReplaceAll(path, ".", "_"))
}

// variableReplacer has the variables of the settings by the names that viper makes of their paths, such as
// WARMROUTE_POLL.TIMEOUT.
type variableReplacer map[string]string

func newVariableReplacer(known []string) variableReplacer {
	r := variableReplacer{}
	for _, path := range known {
		r[envPrefix+"_"+strings.ToUpper(path)] = envName(path)
	}
	return r
}

// Replace returns the variable of a setting, and "", which is never set, for a section: viper would take a variable with
// the name of a section for a value in the place of its settings.
func (r variableReplacer) Replace(name string) string { return r[name] }

// checkEnvironment records which settings have a variable, also one that is "", and adds an error for each WARMROUTE_
// variable that belongs to no setting.
func checkEnvironment(known []string, errs *errorList) {
	// Kubernetes and Docker links set these in every container that runs beside a service named warmroute.
	service := regexp.MustCompile(`_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$`)
	variables, renamed := map[string]string{}, map[string]string{}
	for _, path := range known {
		variables[envName(path)] = path
	}
	for old, now := range renamedSettings {
		renamed[envName(old)] = now
	}
	for _, assignment := range slices.Sorted(slices.Values(os.Environ())) {
		name, _, _ := strings.Cut(assignment, "=")
		if path, ok := variables[name]; ok {
			errs.origin[path] = name
			continue
		}
		if !strings.HasPrefix(name, envPrefix+"_") || name == FileVariable || service.MatchString(name) {
			continue
		}
		if now := renamed[name]; now != "" {
			errs.addUnknown(name, now, "was renamed; use %s", envName(now))
		} else if near := nearestWord(name, slices.Sorted(maps.Keys(variables))); near != "" {
			errs.addUnknown(name, variables[near], "unknown variable; did you mean %s?", near)
		} else {
			errs.add(name, "unknown variable; a variable is %s_ followed by the path of a setting, as in %s", envPrefix, envName("routing.policy"))
		}
	}
}
