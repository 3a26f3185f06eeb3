package main

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/types"
	"go.yaml.in/yaml/v3"
)

// readYAML reads a file of the monitoring profile.
func readYAML(t *testing.T, path string, into any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, into); err != nil {
		t.Fatal(err)
	}
}

func TestComposeMonitoringStandsBesideEachProfile(t *testing.T) {
	for _, profile := range composeProfiles() {
		project := composeProject(t, profile.name, "monitoring")
		want := append([]string{profile.proxy, "prometheus", "grafana"}, profile.replicas...)
		slices.Sort(want)
		if got := project.ServiceNames(); !slices.Equal(got, want) {
			t.Errorf("services %v, want %v", got, want)
		}
		proxy := project.Services[profile.proxy]
		if network := proxy.Networks["default"]; network == nil || !slices.Contains(network.Aliases, "proxy") {
			t.Errorf("%s has no name for Prometheus: %+v", profile.proxy, proxy.Networks)
		}
		admin := proxy.Environment["WARMROUTE_ADMIN"]
		if admin == nil {
			t.Fatalf("%s has its admin listener on loopback", profile.proxy)
		}
		_, port, err := net.SplitHostPort(*admin)
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(proxy.Ports, func(p types.ServicePortConfig) bool { return strconv.Itoa(int(p.Target)) == port }) {
			t.Errorf("%s publishes its admin listener", profile.proxy)
		}
	}
}

func TestComposeMonitoringMountsWhatThereIs(t *testing.T) {
	project := composeProject(t, "sim", "monitoring")
	mounted := map[string]string{}
	for _, name := range []string{"prometheus", "grafana"} {
		s := project.Services[name]
		if _, version, _ := strings.Cut(s.Image, ":"); version == "" || version == "latest" {
			t.Errorf("%s has the image %s, which is not pinned", name, s.Image)
		}
		for _, p := range s.Ports {
			if p.HostIP != "127.0.0.1" {
				t.Errorf("%s publishes %s to other machines", name, p.Published)
			}
		}
		for _, v := range s.Volumes {
			if v.Type != "bind" {
				continue
			}
			if info, err := os.Stat(v.Source); err != nil || info.IsDir() || !v.ReadOnly {
				t.Errorf("%s mounts %s (%v), read-only: %v", name, v.Source, err, v.ReadOnly)
			}
			mounted[v.Target] = v.Source
		}
	}
	for _, flag := range []string{"--config.file=/etc/prometheus/prometheus.yml", "--enable-feature=native-histograms,exemplar-storage"} {
		if !slices.Contains(project.Services["prometheus"].Command, flag) {
			t.Errorf("Prometheus runs without %s", flag)
		}
	}
	var rules struct {
		RuleFiles     []string `yaml:"rule_files"`
		ScrapeConfigs []struct {
			Job           string                       `yaml:"job_name"`
			StaticConfigs []struct{ Targets []string } `yaml:"static_configs"`
		} `yaml:"scrape_configs"`
	}
	readYAML(t, mounted["/etc/prometheus/prometheus.yml"], &rules)
	for _, file := range rules.RuleFiles {
		if mounted[filepath.Join("/etc/prometheus", file)] == "" {
			t.Errorf("Prometheus has no %s", file)
		}
	}
	if job := rules.ScrapeConfigs[0].Job; job != "warmroute" {
		t.Errorf("its job is %s, and the alerts and the board know another", job)
	}
	if targets := rules.ScrapeConfigs[0].StaticConfigs[0].Targets; !slices.Equal(targets, []string{"proxy" + *project.Services["warmroute-sim"].Environment["WARMROUTE_ADMIN"]}) {
		t.Errorf("Prometheus scrapes %v", targets)
	}
	var source struct{ Datasources []struct{ Type, URL string } }
	readYAML(t, mounted["/etc/grafana/provisioning/datasources/warmroute.yml"], &source)
	if d := source.Datasources; len(d) != 1 || d[0].Type != "prometheus" || d[0].URL != "http://prometheus:9090" {
		t.Errorf("Grafana's data sources are %+v", d)
	}
	var boards struct {
		Providers []struct{ Options struct{ Path string } }
	}
	readYAML(t, mounted["/etc/grafana/provisioning/dashboards/warmroute.yml"], &boards)
	home := project.Services["grafana"].Environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
	if len(boards.Providers) != 1 || home == nil || filepath.Dir(*home) != boards.Providers[0].Options.Path || mounted[*home] == "" {
		t.Errorf("Grafana looks for boards at %+v, begins with %v", boards.Providers, home)
	}
}
