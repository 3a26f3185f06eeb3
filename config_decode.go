package main

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
)

// decodeValue is the decode hook for every value. A value comes from YAML with
// a type or from the environment as text; both are read strictly, since the
// decoder's own conversions turn 3.7 into 3 and an interval of 5 into 5 ns.
func decodeValue(from, to reflect.Value) (any, error) {
	value := from.Interface()
	switch to.Interface().(type) {
	case time.Duration:
		return decodeDuration(value)
	case ByteSize:
		return decodeByteSize(value)
	case int:
		return decodeInt(value)
	case float64:
		return decodeFloat(value)
	case bool:
		return decodeBool(value)
	case string:
		if _, ok := value.(string); !ok {
			return nil, fmt.Errorf("wants text, not %s; put it in quotes", describe(value))
		}
	case []BackendConfig:
		return decodeBackendList(value)
	case BackendConfig:
		return decodeBackend(value)
	case []KeyConfig:
		return decodeKeyList(value)
	case KeyConfig:
		return decodeKey(value)
	case time.Time:
		return decodeTime(value)
	}
	return value, nil
}

func decodeDuration(value any) (any, error) {
	switch v := value.(type) {
	case int:
		if v != 0 {
			return nil, fmt.Errorf("%d has no unit; write it like 250ms, %ds or 1m30s", v, v)
		}
		return time.Duration(0), nil
	case string:
		d, err := time.ParseDuration(strings.TrimSpace(v))
		if err != nil {
			return nil, fmt.Errorf("%q is not a duration; write it like 250ms, 2s or 1m30s", v)
		}
		return d, nil
	}
	return nil, fmt.Errorf("wants a duration like 250ms or 2s, not %s", describe(value))
}

func decodeByteSize(value any) (any, error) {
	switch v := value.(type) {
	case int:
		return ByteSize(v), nil
	case string:
		return ParseByteSize(v)
	}
	return nil, fmt.Errorf("wants a size like 64MiB, not %s", describe(value))
}

func decodeInt(value any) (any, error) {
	switch v := value.(type) {
	case int:
		return v, nil
	case string:
		if n, err := strconv.Atoi(strings.TrimSpace(v)); err == nil {
			return n, nil
		}
		return nil, fmt.Errorf("%q is not a whole number", v)
	}
	return nil, fmt.Errorf("wants a whole number, not %s", describe(value))
}

func decodeFloat(value any) (any, error) {
	switch v := value.(type) {
	case int:
		return float64(v), nil
	case float64:
		return v, nil
	case string:
		if x, err := strconv.ParseFloat(strings.TrimSpace(v), 64); err == nil {
			return x, nil
		}
		return nil, fmt.Errorf("%q is not a number", v)
	}
	return nil, fmt.Errorf("wants a number, not %s", describe(value))
}

func decodeBool(value any) (any, error) {
	switch v := value.(type) {
	case bool:
		return v, nil
	case string:
		if b, err := strconv.ParseBool(strings.TrimSpace(v)); err == nil {
			return b, nil
		}
		return nil, fmt.Errorf("%q is neither true nor false", v)
	}
	return nil, fmt.Errorf("wants true or false, not %s", describe(value))
}

// decodeBackendList accepts WARMROUTE_BACKENDS, which is text, besides a list.
func decodeBackendList(value any) (any, error) {
	switch v := value.(type) {
	case string:
		urls := []string{}
		for url := range strings.SplitSeq(v, ",") {
			if url = strings.TrimSpace(url); url != "" {
				urls = append(urls, url)
			}
		}
		return urls, nil
	case []any, []string:
		return v, nil
	}
	return nil, fmt.Errorf("wants a list, not %s; begin each backend with \"- url:\"", describe(value))
}

// decodeBackend accepts a bare URL for a backend that needs nothing else.
func decodeBackend(value any) (any, error) {
	switch v := value.(type) {
	case string:
		return BackendConfig{URL: v, Weight: 1}, nil
	case map[string]any:
		known := []string{"name", "url", "api_key", "ca_file", "server_name", "max_in_flight", "weight"}
		for _, key := range slices.Sorted(maps.Keys(v)) {
			if slices.Contains(known, key) {
				continue
			}
			if near := nearest(key, known); near != "" {
				return nil, fmt.Errorf("unknown key %q; did you mean %s?", key, near)
			}
			return nil, fmt.Errorf("unknown key %q; a backend has %s", key, strings.Join(known, ", "))
		}
		if _, given := v["weight"]; !given {
			v = maps.Clone(v)
			v["weight"] = 1
		}
		return v, nil
	}
	return nil, fmt.Errorf("wants url, name and api_key, or just a URL, not %s", describe(value))
}

// describe names a value's type in YAML's terms. It never shows the value,
// which may be a key.
func describe(value any) string {
	switch value.(type) {
	case string:
		return "text"
	case bool:
		return "true or false"
	case int:
		return "a number"
	case float64:
		return "a decimal number"
	case int64, uint64:
		return "a number that large"
	case time.Time:
		return "a date"
	case []any, []string:
		return "a list"
	}
	return "a section with keys"
}

// addDecodeFaults takes apart the decoder's error: one wrapper around joined
// errors, which nest as the settings do and end in one that knows its path.
func (f *faults) addDecodeFaults(err error) {
	switch e := err.(type) {
	case nil:
	case *mapstructure.DecodeError:
		f.add(e.Name(), "%v", e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			f.addDecodeFaults(inner)
		}
	default:
		if inner := errors.Unwrap(err); inner != nil {
			f.addDecodeFaults(inner)
			return
		}
		f.add("configuration", "%v", err)
	}
}
