package e2e

import (
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"warmroute/config"
)

// unitFile reads one of scripts/systemd into the values of each key, in order.
func unitFile(t *testing.T, name string) map[string][]string {
	t.Helper()
	source, err := os.ReadFile("scripts/systemd/" + name)
	if err != nil {
		t.Fatal(err)
	}
	unit := map[string][]string{}
	for line := range strings.Lines(string(source)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(key, "#") {
			unit[key] = append(unit[key], value)
		}
	}
	return unit
}

// only is the value of a key that is given once.
func only(t *testing.T, unit map[string][]string, key string) string {
	t.Helper()
	if len(unit[key]) != 1 {
		t.Fatalf("%s is %q", key, unit[key])
	}
	return unit[key][0]
}

func TestUnitCommands(t *testing.T) {
	unit := unitFile(t, "warmroute.service")
	for _, line := range append(slices.Clone(unit["ExecStart"]), unit["ExecReload"][0]) {
		argv := strings.Fields(line)
		if path.Base(argv[0]) != "warmroute" {
			t.Errorf("it runs %s", line)
		}
		if status, _, output := runCommand(t, append(argv[1:], "--help")...); status != 0 {
			t.Errorf("%s: %s", line, output)
		}
	}
}

func TestUnitVariables(t *testing.T) {
	variables := settingVariables(t)
	variables[config.FileVariable] = true
	unit := unitFile(t, "warmroute.service")
	given := map[string]string{}
	for _, assignment := range unit["Environment"] {
		name, value, _ := strings.Cut(assignment, "=")
		if given[name] = value; !variables[name] {
			t.Errorf("%s is no setting", name)
		}
	}
	source, _ := os.ReadFile("scripts/systemd/warmroute.service")
	for line := range strings.Lines(string(source)) {
		if assignment, ok := strings.CutPrefix(line, "#Environment="); ok {
			if name, _, _ := strings.Cut(assignment, "="); !variables[name] {
				t.Errorf("in a comment: %s is no setting", name)
			}
		}
	}
	if want := "/var/lib/" + only(t, unit, "StateDirectory"); path.Dir(given["WARMROUTE_INDEX_SNAPSHOT"]) != want {
		t.Errorf("the snapshot is %s, and it may write to %s", given["WARMROUTE_INDEX_SNAPSHOT"], want)
	}
	if want := "/etc/" + only(t, unit, "ConfigurationDirectory"); path.Dir(given[config.FileVariable]) != want {
		t.Errorf("the configuration is %s, and its folder %s", given[config.FileVariable], want)
	}
}

func TestUnitUmaskAllowsAccessLogMode(t *testing.T) {
	unit := unitFile(t, "warmroute.service")
	if mask, err := strconv.ParseUint(only(t, unit, "UMask"), 8, 32); err != nil || 0o640&mask != 0 {
		t.Errorf("the mask %#o takes from mode 0640 (%v)", mask, err)
	}
}

func TestUnitLimits(t *testing.T) {
	unit := unitFile(t, "warmroute.service")
	c := loadConfig(t, "", "http://a:8000", "http://b:8000", "http://c:8000")
	stop, err := time.ParseDuration(only(t, unit, "TimeoutStopSec"))
	if err != nil || stop <= c.Timeouts.ServeAfterTerm+c.Timeouts.Shutdown {
		t.Errorf("it is killed after %v (%v), within timeouts.serve_after_term and timeouts.shutdown", stop, err)
	}
	files, err := strconv.ParseUint(only(t, unit, "LimitNOFILE"), 10, 64)
	if err != nil || c.MaxFileDescriptors(0) > files {
		t.Errorf("it may open %d files (%v), and needs %d", files, err, c.MaxFileDescriptors(0))
	}
	if got := only(t, unit, "Type"); got != "notify" {
		t.Errorf("type %s", got)
	}
}

func TestSocketUnit(t *testing.T) {
	unit := unitFile(t, "warmroute.socket")
	if got := only(t, unit, "FileDescriptorName"); got != "public" {
		t.Errorf("it is called %s", got)
	}
	if got := only(t, unit, "ListenStream"); ":"+got != loadConfig(t, "", "http://a:8000").Listen {
		t.Errorf("it listens on %s", got)
	}
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
	defaults, err := os.ReadFile("config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var settings map[string]any
	if err := yaml.Unmarshal(defaults, &settings); err != nil {
		t.Fatal(err)
	}
	add(settings, "WARMROUTE")
	return variables
}
