package config

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"

	"warmroute/backends"
	"warmroute/proxy/apikey"
)

func decodeSettings(values map[string]any, into any) error {
	d, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{Result: into, DecodeHook: decodeValue, ErrorUnused: true,
		WeaklyTypedInput: true})
	if err != nil {
		return err
	}
	return d.Decode(values)
}

// decodeValue is the decode hook for every value. A value comes from YAML with
// a type or from the environment as text; both are read strictly, since the
// decoder's own conversions turn 3.7 into 3 and an interval of 5 into 5 ns.
func decodeValue(from, to reflect.Value) (any, error) {
	value := from.Interface()
	if v, ok := value.(verbatim); ok {
		value = v.value
	}
	switch to.Interface().(type) {
	case time.Duration:
		return decodeDuration(value)
	case int64:
		return decodeByteSize(value)
	case int:
		return decodeInt(value)
	case float64:
		return decodeFloat(value)
	case bool:
		return decodeBool(value)
	case time.Time:
		return decodeTime(value)
	case string:
		if _, ok := value.(string); !ok {
			return nil, fmt.Errorf("expected a string, got %s; put it in quotes", describeType(value))
		}
	case []string, []netip.Prefix:
		return decodeList(value, " such as [a, b]", "")
	case netip.Prefix:
		return decodeNetwork(value)
	case []Backend:
		return decodeList(value, "", "; begin each backend with \"- url:\"")
	case Backend:
		return normalizeBackend(value)
	case map[string]string:
		return decodeStringMap(value)
	case []ModelName:
		return decodeList(value, "", "; begin each name with \"- name:\"")
	case ModelName:
		return normalizeModelName(value)
	case Members:
		return checkMembers(value)
	case []int:
		return decodeList(value, " of integers such as [1, 9]", "")
	case []StartHook:
		return decodeList(value, "", "; begin each model with \"- model:\"")
	case StartHook:
		return normalizeStartHook(value)
	case []Key:
		return checkKeyList(value)
	case Key:
		return checkKey(value)
	}
	return value, nil
}

// decodeScalar reads a value that has its type, or its text, which parse reads. expected names the type.
func decodeScalar[T any](value any, parse func(string) (T, error), expected string) (any, error) {
	switch v := value.(type) {
	case T:
		return v, nil
	case string:
		if x, err := parse(strings.TrimSpace(v)); err == nil {
			return x, nil
		}
		return nil, fmt.Errorf("%q is not %s", v, expected)
	}
	return nil, fmt.Errorf("expected %s, got %s", expected, describeType(value))
}

func decodeInt(value any) (any, error) { return decodeScalar(value, strconv.Atoi, "an integer") }

func decodeBool(value any) (any, error) {
	return decodeScalar(value, strconv.ParseBool, "true or false")
}

func decodeFloat(value any) (any, error) {
	if n, ok := value.(int); ok {
		return float64(n), nil
	}
	return decodeScalar(value, func(s string) (float64, error) { return strconv.ParseFloat(s, 64) }, "a number")
}

func decodeDuration(value any) (any, error) {
	if n, ok := value.(int); ok && n != 0 {
		return nil, fmt.Errorf("%d has no unit; write a duration such as 250ms, %ds or 1m30s", n, n)
	} else if ok {
		return time.Duration(0), nil
	}
	return decodeScalar(value, parseDuration, "a duration such as 250ms, 2s or 1m30s")
}

// parseDuration is time.ParseDuration, but a number of days may be given as well, as in 30d.
func parseDuration(s string) (time.Duration, error) {
	days, ok := strings.CutSuffix(s, "d")
	if !ok {
		return time.ParseDuration(s)
	}
	n, err := strconv.ParseUint(days, 10, 16)
	return time.Duration(n) * 24 * time.Hour, err
}

func decodeByteSize(value any) (any, error) {
	switch v := value.(type) {
	case int:
		return int64(v), nil
	case string:
		return parseByteSize(v)
	}
	return nil, fmt.Errorf("expected a size such as 64MiB, got %s", describeType(value))
}

// decodeTime reads a date or a time. Its errors show no part of the value.
func decodeTime(value any) (any, error) {
	switch v := value.(type) {
	case time.Time: // a YAML date
		return v, nil
	case string:
		for _, layout := range []string{time.DateOnly, time.RFC3339} {
			if t, err := time.Parse(layout, strings.TrimSpace(v)); err == nil {
				return t, nil
			}
		}
		return nil, errors.New("is not a date or time such as 2027-01-31 or 2027-01-31T18:00:00Z")
	}
	return nil, fmt.Errorf("expected a date such as 2027-01-31, got %s", describeType(value))
}

// decodeList returns a list as it is, and splits the text of an environment variable. what says what is
// expected and advice what to write, in errors.
func decodeList(value any, what, advice string) (any, error) {
	switch v := value.(type) {
	case string:
		return splitAtCommas(v), nil
	case []any, []string:
		return v, nil
	}
	return nil, fmt.Errorf("expected a list%s, got %s%s", what, describeType(value), advice)
}

// decodeNetwork reads a network such as 10.0.0.0/8, or one address.
func decodeNetwork(value any) (any, error) {
	text, ok := value.(string)
	if !ok {
		return nil, fmt.Errorf("expected a network such as 10.0.0.0/8 or an address, got %s", describeType(value))
	}
	text = strings.TrimSpace(text)
	network, err := netip.ParsePrefix(text)
	if address, notAddress := netip.ParseAddr(text); notAddress == nil && address.Zone() == "" {
		network, err = netip.PrefixFrom(address, address.BitLen()), nil
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("%q is not a network such as 10.0.0.0/8 or an address", text)
	case network.Addr().Is4In6():
		return nil, fmt.Errorf("%s is an IPv4 address in IPv6; write it as IPv4", text)
	}
	return network.Masked(), nil
}

// splitAtCommas returns the parts of text between commas, without spaces around them and
// without those that are empty.
func splitAtCommas(text string) []string {
	parts := []string{}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			parts = append(parts, part)
		}
	}
	return parts
}

// normalizeBackend returns a mapping with the settings whose default is not zero, and a bare URL as the Backend that
// needs nothing else.
func normalizeBackend(value any) (any, error) {
	switch v := value.(type) {
	case string:
		return Backend{URL: v, DNS: "auto", Weight: 1, Role: backends.RoleBoth.String(), KVEvents: backends.KVEventsAuto, Ranks: "auto"}, nil
	case map[string]any:
		if key, advice := findUnknownKey[Backend](v, "a backend"); key != "" {
			return nil, fmt.Errorf("unknown key %q; %s", key, advice)
		}
		complete := map[string]any{"dns": "auto", "weight": 1, "role": backends.RoleBoth.String(), "kv_events": backends.KVEventsAuto,
			"ranks": "auto"}
		maps.Copy(complete, v)
		return complete, nil
	}
	return nil, fmt.Errorf("expected a mapping with url, name and so on, or just a URL, got %s", describeType(value))
}

// defaultStartTimeout is that of a StartHook without one: a large model takes minutes to load.
const defaultStartTimeout = 10 * time.Minute

// normalizeStartHook returns a mapping with the settings whose default is not zero.
func normalizeStartHook(value any) (any, error) {
	given, ok := value.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("expected a mapping with model and url, got %s", describeType(value))
	}
	if key, advice := findUnknownKey[StartHook](given, "a start hook"); key != "" {
		return nil, fmt.Errorf("unknown key %q; %s", key, advice)
	}
	complete := map[string]any{"timeout": defaultStartTimeout.String()}
	maps.Copy(complete, given)
	return complete, nil
}

// defaultFallbackAfter is that of a ModelName without one.
const defaultFallbackAfter = 20 * time.Second

// normalizeModelName returns a mapping with the settings whose default is not zero.
func normalizeModelName(value any) (any, error) {
	given, ok := value.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("expected a mapping with name and model, got %s", describeType(value))
	}
	if key, advice := findUnknownKey[ModelName](given, "a name"); key != "" {
		return nil, fmt.Errorf("unknown key %q; %s", key, advice)
	}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if given[key] == nil {
			return nil, fmt.Errorf("%s has no value; give it one or delete the line", key)
		}
	}
	complete := map[string]any{"fallback_after": defaultFallbackAfter.String()}
	maps.Copy(complete, given)
	return complete, nil
}

// checkMembers returns value if it is a mapping that JSON can express. Keys are as they are written.
func checkMembers(value any) (any, error) {
	members, ok := value.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("expected a mapping such as {temperature: 0.2}, got %s", describeType(value))
	}
	for _, name := range slices.Sorted(maps.Keys(members)) {
		if problem := findUnencodable(members[name], 0); problem != "" {
			return nil, fmt.Errorf("%s: %s", name, problem)
		}
	}
	return Members(members), nil
}

// maxMemberDepth bounds the nesting of a member's value.
const maxMemberDepth = 64

// findUnencodable returns what in a value of YAML has no equivalent in JSON; "": nothing.
func findUnencodable(value any, depth int) (problem string) {
	switch v := value.(type) {
	case nil, string, bool, int, int64, uint64:
		return ""
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return "JSON has no infinity and no NaN"
		}
		return ""
	case time.Time:
		return "a date has to be in quotes"
	}
	if depth == maxMemberDepth {
		return fmt.Sprintf("the value nests deeper than %d levels", maxMemberDepth)
	}
	switch v := value.(type) {
	case []any:
		for _, element := range v {
			problem = cmp.Or(problem, findUnencodable(element, depth+1))
		}
		return problem
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			problem = cmp.Or(problem, findUnencodable(v[name], depth+1))
		}
		return problem
	}
	return "the keys of a mapping have to be strings; put them in quotes"
}

// decodeStringMap returns a mapping of strings as it is, and reads the text of an environment variable, as in a=b,c=d.
func decodeStringMap(value any) (any, error) {
	text, ok := value.(string)
	if !ok {
		if _, ok := value.(map[string]any); !ok {
			return nil, fmt.Errorf("expected a mapping, got %s", describeType(value))
		}
		return value, nil
	}
	entries := map[string]any{}
	for _, entry := range splitAtCommas(text) {
		key, value, ok := strings.Cut(entry, "=")
		if !ok {
			return nil, fmt.Errorf("%q has no =; write entries as in a=b,c=d", entry)
		}
		entries[strings.TrimSpace(key)] = strings.TrimSpace(value)
	}
	return entries, nil
}

// checkKeyList returns value if it is a list. Keys are kept out of the environment,
// where every child process could read them.
func checkKeyList(value any) (list any, err error) {
	if list, ok := value.([]any); ok {
		return list, nil
	}
	return nil, fmt.Errorf("expected a list, got %s; begin each key with \"- name:\", or name a file in keys_file", describeType(value))
}

// checkKey returns value if it is the mapping of a key. Its errors show no part of the value that may be
// a key in the wrong place.
func checkKey(value any) (key any, err error) {
	given, ok := value.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("expected a mapping with name and sha256, got %s; plain keys belong in keys_file", describeType(value))
	}
	if name, advice := findUnknownKey[Key](given, "a key"); name != "" {
		if len(name) >= apikey.MinKeyLength {
			return nil, fmt.Errorf("unknown setting; %s", advice)
		}
		return nil, fmt.Errorf("unknown setting %q; %s", name, advice) // too short for a key
	}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		if given[name] == nil {
			return nil, fmt.Errorf("%s has no value; give it one or delete the line", name)
		}
	}
	switch models, listed := given["models"].([]any); {
	case given["models"] != nil && !listed:
		return nil, fmt.Errorf("models: expected a list, got %s", describeType(given["models"]))
	case listed && len(models) == 0:
		return nil, errors.New("models is empty, which allows none; delete the line to allow all models")
	}
	return given, nil
}

// findUnknownKey returns a key of a mapping that is not the name of a setting of T, "" if there is none,
// and what to do. what names the mapping.
func findUnknownKey[T any](given map[string]any, what string) (key, advice string) {
	known := settingNames[T]()
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if slices.Contains(known, key) {
			continue
		}
		if near := nearestWord(key, known); near != "" {
			return key, "did you mean " + near + "?"
		}
		return key, what + " has " + strings.Join(known, ", ")
	}
	return "", ""
}

// describeType names the type of a value, with an article. It never shows the value, which may be a secret.
func describeType(value any) string {
	switch value.(type) {
	case string:
		return "a string"
	case bool:
		return "a boolean"
	case int:
		return "a number"
	case float64:
		return "a decimal number"
	case int64, uint64:
		return "a number that is out of range"
	case time.Time:
		return "a date"
	case []any, []string:
		return "a list"
	}
	return "a mapping"
}

// addDecodeErrors adds the errors of the decoder: one error wraps the joined
// errors of all settings, which nest as the settings do.
func (e *errorList) addDecodeErrors(err error) {
	switch err := err.(type) {
	case nil:
	case *mapstructure.DecodeError:
		e.add(err.Name(), "%v", err.Unwrap())
	case interface{ Unwrap() []error }:
		for _, inner := range err.Unwrap() {
			e.addDecodeErrors(inner)
		}
	default:
		if inner := errors.Unwrap(err); inner != nil {
			e.addDecodeErrors(inner)
			return
		}
		e.add("configuration", "%v", err)
	}
}
