package main

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"time"
)

// The part of CycloneDX 1.5 that there is something to say for.
type (
	bom struct {
		Format       string      `json:"bomFormat"`
		Spec         string      `json:"specVersion"`
		Serial       string      `json:"serialNumber"`
		Version      int         `json:"version"`
		Metadata     bomMetadata `json:"metadata"`
		Components   []component `json:"components"`
		Dependencies []depends   `json:"dependencies"`
	}
	bomMetadata struct {
		Timestamp string    `json:"timestamp"`
		Component component `json:"component"`
	}
	component struct {
		Ref        string     `json:"bom-ref"`
		Type       string     `json:"type"`
		Name       string     `json:"name"`
		Version    string     `json:"version"`
		Purl       string     `json:"purl"`
		Hashes     []bomHash  `json:"hashes,omitempty"`
		Licences   []licensed `json:"licenses,omitempty"`
		Properties []property `json:"properties,omitempty"`
	}
	bomHash struct {
		Algorithm string `json:"alg"`
		Content   string `json:"content"`
	}
	licensed struct {
		License struct {
			ID string `json:"id"`
		} `json:"license"`
	}
	property struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	}
	depends struct {
		Ref string   `json:"ref"`
		On  []string `json:"dependsOn,omitempty"`
	}
)

// sbom is the binary's bill of materials, in CycloneDX's JSON: the modules that are
// linked, as the binary itself lists them, and the settings of its build.
func sbom(info *buildinfo.BuildInfo, binary []byte, linked []*module, made time.Time) ([]byte, error) {
	sum := checksum(binary)
	main := newComponent("application", info.Main.Path, info.Main.Version, []string{"Apache-2.0"})
	main.Hashes = []bomHash{{"SHA-256", sum}}
	for _, s := range info.Settings {
		main.Properties = append(main.Properties, property{"go:build:" + s.Key, s.Value})
	}
	b := bom{
		Format: "CycloneDX", Spec: "1.5", Version: 1,
		// A UUID that is the same whenever the binary is.
		Serial:     fmt.Sprintf("urn:uuid:%s-%s-5%s-8%s-%s", sum[:8], sum[8:12], sum[13:16], sum[17:20], sum[20:32]),
		Metadata:   bomMetadata{made.Format(time.RFC3339), main},
		Components: []component{},
	}
	all := depends{Ref: main.Ref}
	for _, m := range linked {
		c := newComponent("library", m.path, m.version, m.ids)
		if m.sum != "" {
			c.Properties = []property{{"go:sum", m.sum}}
		}
		b.Components = append(b.Components, c)
		all.On = append(all.On, c.Ref)
	}
	b.Dependencies = []depends{all} // linked by it, directly or not
	out, err := json.MarshalIndent(b, "", "  ")
	return append(out, '\n'), err
}

func newComponent(kind, path, version string, licences []string) component {
	purl := "pkg:golang/" + path + "@" + version
	c := component{Ref: purl, Type: kind, Name: path, Version: version, Purl: purl}
	for _, id := range licences {
		var l licensed
		l.License.ID = id
		c.Licences = append(c.Licences, l)
	}
	return c
}
