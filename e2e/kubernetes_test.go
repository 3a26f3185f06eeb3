package e2e

import (
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"
)

// manifest is what the tests read of an object of Kubernetes.
type manifest struct {
	Kind     string
	Metadata struct {
		Name   string
		Labels map[string]string
	}
	Data map[string]string
	Spec struct {
		Selector  any
		ClusterIP string `yaml:"clusterIP"`
		Ports     []struct {
			Name       string
			TargetPort string `yaml:"targetPort"`
			Port       int
		}
		Endpoints []struct{ Port string }
		Template  struct {
			Metadata struct{ Labels map[string]string }
			Spec     struct {
				Grace      int `yaml:"terminationGracePeriodSeconds"`
				Containers []struct {
					Env            []struct{ Name, Value string }
					Ports          []struct{ Name string }
					LivenessProbe  probe            `yaml:"livenessProbe"`
					ReadinessProbe probe            `yaml:"readinessProbe"`
					VolumeMounts   []map[string]any `yaml:"volumeMounts"`
				}
				Volumes []struct {
					ConfigMap struct{ Name string } `yaml:"configMap"`
				}
			}
		}
	}
}

type probe struct {
	HTTPGet       struct{ Path, Port string } `yaml:"httpGet"`
	PeriodSeconds int                         `yaml:"periodSeconds"`
}

// selected returns the labels of spec.selector, which an object of most kinds has in matchLabels.
func (m *manifest) selected() map[string]string {
	labels := map[string]string{}
	selector, _ := m.Spec.Selector.(map[string]any)
	if match, ok := selector["matchLabels"].(map[string]any); ok {
		selector = match
	}
	for name, value := range selector {
		labels[name], _ = value.(string)
	}
	return labels
}

// readManifests returns the objects in docs/deploy/kubernetes by file and "Kind name".
func readManifests(t *testing.T) map[string]map[string]*manifest {
	t.Helper()
	files, err := filepath.Glob("docs/deploy/kubernetes/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	all := map[string]map[string]*manifest{}
	for _, name := range files {
		text, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer text.Close()
		all[filepath.Base(name)] = map[string]*manifest{}
		for objects := yaml.NewDecoder(text); ; {
			var m manifest
			if err := objects.Decode(&m); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			all[filepath.Base(name)][m.Kind+" "+m.Metadata.Name] = &m
		}
	}
	return all
}

// TestKubernetesSelectors has each Service, budget and monitor select what it is for.
func TestKubernetesSelectors(t *testing.T) {
	all := readManifests(t)
	for file, workload := range map[string]string{"proxy.yaml": "Deployment warmroute", "vllm.yaml": "StatefulSet vllm",
		"vllm-prefill.yaml": "StatefulSet vllm-prefill", "vllm-decode.yaml": "StatefulSet vllm-decode", "valkey.yaml": "Deployment valkey"} {
		pods := all[file][workload].Spec.Template
		for name, m := range all[file] {
			if got := m.selected(); !maps.Equal(got, pods.Metadata.Labels) {
				t.Errorf("%s: %s selects %v, and the pods have %v", file, name, got, pods.Metadata.Labels)
			}
			for _, port := range m.Spec.Ports {
				if !slices.ContainsFunc(pods.Spec.Containers[0].Ports, func(p struct{ Name string }) bool { return p.Name == port.TargetPort }) {
					t.Errorf("%s: %s has a port %s that is none of the container's", file, name, port.TargetPort)
				}
			}
		}
	}
	service, monitor := all["proxy.yaml"]["Service warmroute"], all["servicemonitor.yaml"]["ServiceMonitor warmroute"]
	if !maps.Equal(monitor.selected(), service.Metadata.Labels) || monitor.Spec.Endpoints[0].Port != service.Spec.Ports[1].Name {
		t.Errorf("the monitor selects %v and port %+v", monitor.selected(), monitor.Spec.Endpoints)
	}
	for _, name := range []string{"vllm", "vllm-prefill", "vllm-decode"} {
		if s := all[name+".yaml"]["Service "+name]; s.Spec.ClusterIP != "None" || s.Spec.Ports[0].Port != 8000 {
			t.Errorf("the Service of the replicas: %+v", s.Spec)
		}
	}
}

// TestKubernetesProxy compares the Deployment with what the program does.
func TestKubernetesProxy(t *testing.T) {
	pod := readManifests(t)["proxy.yaml"]["Deployment warmroute"].Spec.Template.Spec
	c := loadConfig(t, "backends: [http://127.0.0.1:8000]\n")
	if grace := time.Duration(pod.Grace) * time.Second; grace <= c.Timeouts.ServeAfterTerm+c.Timeouts.Shutdown {
		t.Errorf("the grace period %v is too short", grace)
	}
	container := pod.Containers[0]
	if p := container.LivenessProbe; p.HTTPGet.Path != "/livez" {
		t.Errorf("liveness: %+v", p)
	}
	if p := container.ReadinessProbe; p.HTTPGet.Path != "/readyz" || time.Duration(p.PeriodSeconds)*time.Second >= c.Timeouts.ServeAfterTerm {
		t.Errorf("readiness: %+v", p)
	}
	if mount := container.VolumeMounts[0]; mount["subPath"] != nil || mount["mountPath"] != filepath.Dir(container.Env[0].Value) {
		t.Errorf("%v is mounted, and the configuration is %v", mount, container.Env)
	}
}

// TestKubernetesConfigMaps starts `check` with the files of each ConfigMap, mounted as in the pod.
func TestKubernetesConfigMaps(t *testing.T) {
	all := readManifests(t)
	pod := all["proxy.yaml"]["Deployment warmroute"].Spec.Template.Spec
	for file, backends := range map[string]string{"config-dns.yaml": "1 backend",
		"config-disaggregation.yaml": "2 backends (1 for prefill, 1 for decode)", "config-file.yaml": "2 backends"} {
		m := all[file]["ConfigMap "+pod.Volumes[0].ConfigMap.Name]
		if m == nil {
			t.Errorf("%s has not the ConfigMap of the pod", file)
			continue
		}
		dir := t.TempDir()
		for name, text := range m.Data {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.ReplaceAll(text, "/etc/warmroute", dir)), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		path := filepath.Join(dir, filepath.Base(pod.Containers[0].Env[0].Value))
		if status, stdout, stderr := runCommand(t, "check", "--config", path); status != 0 || !strings.HasPrefix(stdout, "ok: "+backends+",") {
			t.Errorf("%s: status %d, %s%s", file, status, stdout, stderr)
		}
	}
}
