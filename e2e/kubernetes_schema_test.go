//go:build kubernetes

package e2e

import (
	"os/exec"
	"path/filepath"
	"testing"
)

// TestKubernetesSchemas validates the manifests against the schemas of an old and a new version of Kubernetes.
// ServiceMonitor is not among them.
func TestKubernetesSchemas(t *testing.T) {
	files, err := filepath.Glob("docs/deploy/kubernetes/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, version := range []string{"1.30", "1.37"} {
		args := append([]string{"--strict", "--no-warn", "--kubernetes-version", version}, files...)
		if output, err := exec.CommandContext(t.Context(), "kubernetes-validate", args...).CombinedOutput(); err != nil {
			t.Errorf("Kubernetes %s: %v\n%s", version, err, output)
		}
	}
}
