package config

import (
	"bytes"
	"encoding/json"
	"flag"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"warmroute/router/policy"
)

// The schema is for editors and is not compiled into the binary, which validates by the same tags.
const schemaFile = "../docs/config.schema.json"

var update = flag.Bool("update", false, "write "+schemaFile)

// TestSchemaIsCurrent fails if the schema is not the one that the settings' tags, the comments and the
// defaults in config.yaml give: go generate ./config writes it.
func TestSchemaIsCurrent(t *testing.T) {
	var want bytes.Buffer
	e := json.NewEncoder(&want)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(buildSchema(t)); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(schemaFile, want.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(schemaFile); err != nil || !bytes.Equal(got, want.Bytes()) {
		t.Errorf("%s is out of date (%v): run go generate ./config", schemaFile, err)
	}
}

type schema = map[string]any

func buildSchema(t *testing.T) schema {
	t.Helper()
	given, err := decodeYAML(defaults)
	if err != nil {
		t.Fatal(err)
	}
	comments := settingComments(string(defaults))
	root := newSection("Configuration of warmroute.")
	root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	root["title"] = "warmroute"
	for _, s := range settingsOf(reflect.ValueOf(Config{}), "", false) {
		section, value := root, any(given)
		names := strings.Split(s.path, ".")
		for i, name := range names {
			value = value.(map[string]any)[name]
			if i < len(names)-1 {
				section = subsection(section, name, comments[strings.Join(names[:i+1], ".")])
			}
		}
		one := settingSchema(&s)
		if text := comments[s.path]; text != "" {
			one["description"] = text
		}
		if _, isList := value.([]any); !isList || len(value.([]any)) > 0 {
			one["default"] = value
		}
		section["properties"].(schema)[s.name] = one
	}
	return root
}

func newSection(description string) schema {
	s := schema{"type": []string{"object", "null"}, "properties": schema{}, "additionalProperties": false}
	if description != "" {
		s["description"] = description
	}
	return s
}

// subsection returns the section of another with a name, and adds it if it is not there.
func subsection(of schema, name, description string) schema {
	properties := of["properties"].(schema)
	if properties[name] == nil {
		properties[name] = newSection(description)
	}
	return properties[name].(schema)
}

// settingSchema returns the schema of one setting: as decodeValue reads it, within the bounds of its tags.
func settingSchema(s *setting) schema {
	if s.path == "routing.policy" {
		var names []string
		for _, name := range testLoader.Policies.Names() {
			names = append(names, name, name+policy.WithQueue)
		}
		return schema{"enum": names}
	}
	if names := s.tag.Get("oneof"); names != "" {
		return schema{"enum": strings.Fields(names)}
	}
	switch s.value.Interface().(type) {
	case time.Duration:
		return schema{"anyOf": []schema{{"type": "string", "pattern": `^ *(([0-9.]+(ns|us|µs|ms|s|m|h))+|[0-9]+d) *$`}, {"const": "0"},
			{"const": 0}}}
	case int64:
		number := schema{"type": "integer"}
		addBounds(number, s.tag, decodeByteSize)
		return schema{"anyOf": []schema{number, {"type": "string", "pattern": `^ *[0-9]+ *([KMGTkmgt]?[Ii]?[Bb])? *$`}}}
	case int:
		return numberSchema("integer", s.tag, decodeInt)
	case float64:
		return numberSchema("number", s.tag, decodeFloat)
	case bool:
		return schema{"type": "boolean"}
	case []string, []netip.Prefix:
		return schema{"anyOf": []schema{{"type": "array", "items": schema{"type": "string"}}, {"type": "string"}}}
	case []Backend:
		return schema{"type": "array", "items": schema{"anyOf": []schema{{"type": "string"}, elementSchema[Backend]("backends", "url")}}}
	case map[string]string:
		return schema{"anyOf": []schema{{"type": "object", "additionalProperties": schema{"type": "string"}}, {"type": "string"}}}
	case []ModelName:
		return schema{"type": "array", "items": elementSchema[ModelName]("models.names", "name")}
	case Members:
		return schema{"type": "object"}
	case []int:
		return schema{"type": "array", "items": schema{"type": "integer"}}
	case []StartHook:
		return schema{"type": "array", "items": elementSchema[StartHook]("start_hooks", "model")}
	case []Key:
		return schema{"type": "array", "items": elementSchema[Key]("keys", "name")}
	}
	return schema{"type": "string"} // text and dates
}

// numberSchema returns the schema of a number, which may be 0 besides if the tag says so.
func numberSchema(kind string, tag reflect.StructTag, decode func(any) (any, error)) schema {
	number := schema{"type": kind}
	addBounds(number, tag, decode)
	if strings.HasPrefix(tag.Get("range"), "0|") {
		return schema{"anyOf": []schema{{"const": 0}, number}}
	}
	return number
}

// addBounds adds the bounds in the tag.
func addBounds(number schema, tag reflect.StructTag, decode func(any) (any, error)) {
	low, high, _ := strings.Cut(strings.TrimPrefix(tag.Get("range"), "0|"), "..")
	if least, err := decode(low); err == nil {
		number["minimum"] = least
	}
	if most, err := decode(high); err == nil {
		number["maximum"] = most
	}
}

// elementSchema returns the schema of an element of a list, which config.yaml documents by an example.
func elementSchema[T any](list, required string) schema {
	s := newSection("")
	s["type"], s["required"] = "object", []string{required}
	comments := exampleComments(string(defaults), list)
	for _, one := range settingsOf(reflect.ValueOf(*new(T)), "", false) {
		property := settingSchema(&one)
		if comments[one.name] == "" {
			panic("config.yaml has no comment on " + list + "[]." + one.name)
		}
		property["description"] = comments[one.name]
		s["properties"].(schema)[one.name] = property
	}
	return s
}

// settingComments returns the comments of config.yaml by the paths of the settings and sections below them.
func settingComments(yaml string) map[string]string {
	found := map[string]string{}
	var path, comment []string
	for line := range strings.Lines(yaml) {
		text := strings.TrimSpace(line)
		if after, ok := strings.CutPrefix(text, "#"); ok {
			comment = append(comment, after)
			continue
		}
		if name, _, ok := strings.Cut(text, ":"); ok && regexp.MustCompile(`^\w+$`).MatchString(name) {
			depth := (len(line) - len(strings.TrimLeft(line, " "))) / 2
			path = append(path[:depth], name)
			found[strings.Join(path, ".")] = joinComment(comment)
		}
		comment = nil
	}
	return found
}

// joinComment returns the text of a comment, without the examples in it, which are indented.
func joinComment(lines []string) string {
	lines = slices.DeleteFunc(lines, func(line string) bool { return strings.HasPrefix(line, "  ") })
	return strings.Join(strings.Fields(strings.Join(lines, " ")), " ")
}

// exampleComments returns the comments in the example above a list of config.yaml, by the names of the settings.
func exampleComments(yaml, list string) map[string]string {
	section, name, inSection := strings.Cut(list, ".")
	indent := "  "
	if !inSection {
		name, indent = section, ""
	}
	head, _, _ := strings.Cut(yaml, "\n"+indent+name+": []")
	block := strings.ReplaceAll(head[strings.LastIndex(head, "\n\n"):], "\n"+indent, "\n")
	_, example, _ := strings.Cut(block, "\n#   - ")
	found := map[string]string{}
	name = ""
	first := regexp.MustCompile(`^#?\s*(\w+): .*?\s#\s+(.*)$`)
	next := regexp.MustCompile(`^#\s+#\s+(.*)$`)
	for line := range strings.Lines(example) {
		line = strings.TrimRight(line, "\n")
		if m := first.FindStringSubmatch(line); m != nil {
			name = m[1]
			found[name] = m[2]
		} else if m := next.FindStringSubmatch(line); m != nil {
			found[name] += " " + m[1]
		} else {
			break
		}
	}
	return found
}

func TestSchemaValidates(t *testing.T) {
	file, err := os.Open(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	document, err := jsonschema.UnmarshalJSON(file)
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("config", document); err != nil {
		t.Fatal(err)
	}
	compiled := c.MustCompile("config")
	validate := func(text string) error {
		t.Helper()
		given, err := decodeYAML([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		asJSON, err := json.Marshal(given)
		if err != nil {
			t.Fatal(err)
		}
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(asJSON))
		if err != nil {
			t.Fatal(err)
		}
		return compiled.Validate(value)
	}
	good := map[string]string{"config.yaml": string(defaults)}
	examples, err := filepath.Glob("../docs/deploy/*/warmroute.yaml")
	if err != nil || len(examples) == 0 {
		t.Fatal(examples, err)
	}
	for _, name := range examples {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		good[name] = string(text)
		if _, err := load(t, string(text)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for path, other := range otherValues() {
		yaml, indent := "", ""
		names := strings.Split(path, ".")
		for i, section := range names {
			yaml += indent + section + ":"
			if i < len(names)-1 {
				yaml += "\n"
			}
			indent += "  "
		}
		if asJSON, err := json.Marshal(other.value); err == nil && reflect.TypeOf(other.value) != reflect.TypeFor[time.Duration]() {
			good[path] = yaml + " " + string(asJSON) + "\n"
		} else {
			good[path] = yaml + " \"" + other.text + "\"\n"
		}
	}
	good["backends"] = "backends: [\"http://a:8000\", {url: \"http://b:8000\", weight: 2, kv_events: auto}]\nkeys: [{name: a, models: [m], " +
		"expires: 2027-01-01, queue_time: 24h}]\npoll:\n"
	for _, name := range slices.Sorted(maps.Keys(good)) {
		if err := validate(good[name]); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, bad := range []string{
		"lisen: x", "poll: {interval: 5}", "poll: {interval: soon}", "routing: {attempts: 0}", "routing: {breaker: {failures: -1}}",
		"log: {level: loud}",
		"limits: {body_bytes: 64M}", "backends: [{name: a}]", "backends: [{url: a, weight: 0}]", "keys: [{name: a, secret: b}]",
		"routing: {policy: fastest}",
	} {
		if validate(bad) == nil {
			t.Errorf("%s is valid", bad)
		}
	}
}
