package e2e

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"
)

// alertRule is one of alerts.yml.
type alertRule struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

func readAlerts(t *testing.T) []alertRule {
	t.Helper()
	var file struct{ Groups []struct{ Rules []alertRule } }
	readYAML(t, "scripts/monitoring/alerts.yml", &file)
	if len(file.Groups) != 1 {
		t.Fatalf("%d groups of rules", len(file.Groups))
	}
	return file.Groups[0].Rules
}

func TestAlertAnnotations(t *testing.T) {
	guide, err := os.ReadFile("docs/reference/alerts.md")
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, r := range readAlerts(t) {
		named[r.Alert] = true
		if r.Annotations["summary"] == "" || r.Labels["severity"] == "" {
			t.Errorf("%s lacks a summary or a severity", r.Alert)
		}
		if want := "docs/reference/alerts.md#" + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != want {
			t.Errorf("the runbook of %s is %q, want %q", r.Alert, r.Annotations["runbook_url"], want)
		}
		if !bytes.Contains(guide, []byte("\n## "+r.Alert+"\n")) {
			t.Errorf("docs/reference/alerts.md has no section for %s", r.Alert)
		}
	}
	for _, section := range regexp.MustCompile(`(?m)^## (Warmroute\w+)$`).FindAllSubmatch(guide, -1) {
		if !named[string(section[1])] {
			t.Errorf("docs/reference/alerts.md has a section for %s, which is not an alert", section[1])
		}
	}
}

// TestAlertsTestedFiringAndNot sees that each has a case in which it fires and
// one in which it does not.
func TestAlertsTestedFiringAndNot(t *testing.T) {
	var file struct {
		Tests []struct {
			Alerts []struct {
				Name   string `yaml:"alertname"`
				Expect []any  `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		}
	}
	readYAML(t, "scripts/monitoring/alerts_test.yml", &file)
	cases := map[string][2]int{}
	for _, test := range file.Tests {
		for _, a := range test.Alerts {
			n := cases[a.Name]
			n[min(len(a.Expect), 1)]++
			cases[a.Name] = n
		}
	}
	for _, r := range readAlerts(t) {
		if n := cases[r.Alert]; n[0] == 0 || n[1] == 0 {
			t.Errorf("%s is silent in %d cases and fires in %d", r.Alert, n[0], n[1])
		}
	}
}

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
