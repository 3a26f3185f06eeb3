package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"time"
)

// object is a JSON object. Its keys are written in order.
type object map[string]any

// sbom returns the software bill of materials of the binary in CycloneDX 1.5: the
// linked modules, as the binary lists them, and its build settings.
func sbom(info *buildinfo.BuildInfo, binary []byte, modules []*module, created time.Time) ([]byte, error) {
	sum := fmt.Sprintf("%x", sha256.Sum256(binary))
	main := component("application", info.Main.Path, info.Main.Version, []string{"Apache-2.0"})
	main["hashes"] = []object{{"alg": "SHA-256", "content": sum}}
	var settings []object
	for _, s := range info.Settings {
		settings = append(settings, object{"name": "go:build:" + s.Key, "value": s.Value})
	}
	main["properties"] = settings

	components, dependencies := []object{}, []any{}
	for _, m := range modules {
		c := component("library", m.path, m.version, m.ids)
		if m.sum != "" {
			c["properties"] = []object{{"name": "go:sum", "value": m.sum}}
		}
		components, dependencies = append(components, c), append(dependencies, c["bom-ref"])
	}
	out, err := json.MarshalIndent(object{
		"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
		// A UUID derived from the binary, so that the same build has the same.
		"serialNumber": fmt.Sprintf("urn:uuid:%s-%s-5%s-8%s-%s", sum[:8], sum[8:12], sum[13:16], sum[17:20], sum[20:32]),
		"metadata":     object{"timestamp": created.Format(time.RFC3339), "component": main},
		"components":   components,
		"dependencies": []object{{"ref": main["bom-ref"], "dependsOn": dependencies}}, // direct or not
	}, "", "  ")
	return append(out, '\n'), err
}

func component(kind, path, version string, licences []string) object {
	purl := "pkg:golang/" + path + "@" + version
	var ids []object
	for _, id := range licences {
		ids = append(ids, object{"license": object{"id": id}})
	}
	return object{"bom-ref": purl, "type": kind, "name": path, "version": version, "purl": purl, "licenses": ids}
}
