package config

import (
	"bufio"
	"bytes"
	"fmt"
	"strings"

	"warmroute/backends"
)

// readBackendsFile adds the backends of backends_file, if it is given, to those of the list.
func (c *Config) readBackendsFile(errs *errorList) {
	content := readFile(errs, "backends_file", c.BackendsFile)
	if c.BackendsFile == "" || errs.hasAny("backends_file") {
		return
	}
	values, err := parseBackendsFile([]byte(content))
	if err != nil {
		errs.addYAMLErrors(c.BackendsFile, []byte(content), []string{"backends"}, err)
		return
	}
	var file struct {
		Backends []Backend `mapstructure:"backends"`
	}
	inFile := errorList{}
	inFile.addDecodeErrors(decodeSettings(values, &file))
	for _, line := range inFile.lines {
		path, message, _ := strings.Cut(line, ": ")
		errs.add(c.BackendsFile+": "+path, "%s", message)
	}
	for _, b := range file.Backends {
		b.Source = backends.FromFile
		c.Backends = append(c.Backends, b)
	}
}

// parseBackendsFile reads one URL a line, with comments after #, or YAML: a list of backends, or a
// mapping that has them under backends.
func parseBackendsFile(data []byte) (values map[string]any, err error) {
	urls := []any{}
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, maxFileBytes+1)
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		switch line = strings.TrimSpace(line); {
		case line == "":
		case !strings.Contains(line, "://") || strings.ContainsAny(line, " \t"):
			return parseBackendsYAML(data, line == "-" || strings.HasPrefix(line, "- "))
		default:
			urls = append(urls, line)
		}
	}
	return map[string]any{"backends": urls}, lines.Err()
}

// parseBackendsYAML reads a mapping with backends, or their list alone.
func parseBackendsYAML(data []byte, isList bool) (values map[string]any, err error) {
	if isList {
		data = append([]byte("backends: \n"), data...)
	}
	if values, err = decodeYAML(data); err != nil {
		return nil, err
	}
	for key := range values {
		if key != "backends" {
			return nil, fmt.Errorf("unknown setting %q; write a list of backends, or one URL a line", key)
		}
	}
	return values, nil
}

// backendPath returns how errors name the backend with an index.
func (c *Config) backendPath(i int) string {
	if c.Backends[i].Source != backends.FromFile {
		return fmt.Sprintf("backends[%d]", i)
	}
	first := 0
	for c.Backends[first].Source != backends.FromFile {
		first++
	}
	return fmt.Sprintf("%s: backends[%d]", c.BackendsFile, i-first)
}
